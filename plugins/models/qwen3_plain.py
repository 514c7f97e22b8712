"""``architecture=Qwen3Plain``: Qwen3 with the decoder layer written out from tensor-parallel layers, for readers.

Two successive matrices, the first split by its outputs and the second by its inputs, need one all-reduce between the
ranks and no other communication. A decoder layer has two such pairs, in attention and in the MLP, so it needs two
all-reduces (Shoeybi et al., Megatron-LM, 2019). Embedding, LM head and weight loading come from the shared decoder
(`minisgl.models.decoder`). The shared decoder's layer computes the same, but fuses all-reduce, addition and norm into
one call.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from minisgl.attention import LayerSpec, QKNorm
from minisgl.hooks import hookimpl
from minisgl.layers import (
    Context,
    LinearColParallelMerged,
    LinearQKVMerged,
    LinearRowParallel,
    RMSNorm,
    silu_and_mul,
)
from minisgl.models.config import ModelConfig
from minisgl.models.decoder import Decoder


class Attention(nn.Module):
    """Grouped-query attention over the pages of the KV pool. Attributes with weights have the checkpoint's names."""

    # lab: shard.attention
    def __init__(self, index: int, config: ModelConfig, ctx: Context):
        super().__init__()
        self.ctx = ctx
        heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        # 1. A rank gets whole heads, with their queries, keys and values, so attention needs no communication.
        self.qkv_proj = LinearQKVMerged(config.hidden_size, heads, kv_heads, dim, ctx, bias=config.attention_bias)
        # 2. Split by its inputs, which are this rank's heads: every rank computes a partial sum.
        self.o_proj = LinearRowParallel(heads * dim, config.hidden_size, ctx, bias=config.attention_bias)
        # 3. q_norm and k_norm normalise one head at a time: their ``dim`` is head_dim. Every rank has whole heads and
        #    all weights of both norms.
        self.q_norm = RMSNorm(dim, config.rms_norm_eps, ctx)
        self.k_norm = RMSNorm(dim, config.rms_norm_eps, ctx)
        # 4. The KV pool and the attention backend count the heads of this rank, not those of the whole model. The scale
        #    is head_dim ** -0.5, and the sliding window of the layer is `config.window(index)`.
        self.spec = LayerSpec(
            index=index,
            q_heads=self.qkv_proj.q_heads,
            kv_heads=self.qkv_proj.kv_heads,
            head_dim=dim,
            scale=dim**-0.5,
            window=config.window(index),
        )

    def forward(self, x: Tensor, cos_sin: Tensor, out_cache_loc: Tensor) -> Tensor:
        """Compute attention of x [tokens, hidden]; x and the result are the same on every rank.

        cos_sin is [tokens, head_dim] float32; out_cache_loc [tokens] is each token's KV location.
        """
        spec, attention = self.spec, self.ctx.attention
        norm = QKNorm(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)
        # 5. Normalise and rotate queries and keys, and store keys and values, before attention reads them.
        q = attention.norm_rope_store(spec, self.qkv_proj(x), norm, cos_sin, out_cache_loc)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        attention.forward(spec, q, out)
        # 6. o_proj includes the first all-reduce of the layer.
        projected: Tensor = self.o_proj(out.flatten(1))
        return projected

    # lab: end


class MLP(nn.Module):
    """The gated MLP: down(silu(gate(x)) · up(x))."""

    # lab: shard.mlp
    def __init__(self, config: ModelConfig, ctx: Context):
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        # 1. Gate and up are split alike, so that elements which are multiplied with each other are on the same rank.
        self.gate_up_proj = LinearColParallelMerged(hidden, (inner, inner), ("gate_proj", "up_proj"), ctx)
        # 2. The inputs of down are the inner elements of this rank; down includes the second all-reduce of the layer.
        self.down_proj = LinearRowParallel(inner, hidden, ctx)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the MLP of x [tokens, hidden]; x and the result are the same on every rank."""
        out: Tensor = self.down_proj(silu_and_mul(self.gate_up_proj(x)))
        return out

    # lab: end


class Block(nn.Module):
    """One decoder layer: attention, then MLP. Each reads the normalised residual stream; its output is added."""

    # lab: shard.block
    def __init__(self, index: int, config: ModelConfig, ctx: Context):
        super().__init__()
        # 1. The attributes have the checkpoint's names: input_layernorm, self_attn, post_attention_layernorm, mlp.
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, ctx)
        self.self_attn = Attention(index, config, ctx)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, ctx)
        self.mlp = MLP(config, ctx)

    def forward(self, x: Tensor, residual: None, cos_sin: Tensor, out_cache_loc: Tensor) -> tuple[Tensor, None]:
        """Compute the layer; x [tokens, hidden] is the residual stream, the same on every rank before and after.

        ``residual`` is always None: only layers that leave the addition to the next layer's norm use it. x may be
        overwritten.
        """
        # 2. Every rank holds the residual stream. So it is added after the all-reduce: added before, it would be
        #    counted once for every rank.
        x = x + self.self_attn(self.input_layernorm(x), cos_sin, out_cache_loc)
        return x + self.mlp(self.post_attention_layernorm(x)), None

    # lab: end


class Qwen3Plain(Decoder):
    """Dense Qwen3. Its checkpoints name Qwen3ForCausalLM; the option ``architecture`` selects this class instead."""

    model_type = "qwen3"
    defaults: ClassVar[Mapping[str, Any]] = {
        "num_key_value_heads": 32,
        "head_dim": 128,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
        "layer_types": None,
    }

    def block(self, index: int) -> nn.Module:
        """Build layer ``index``."""
        return Block(index, self.config, self.ctx)


@hookimpl
def minisgl_models() -> Mapping[str, type]:
    """Register the architecture."""
    return {"Qwen3Plain": Qwen3Plain}
