"""`architecture=Qwen3Plain`: Qwen3 with its decoder block written out from the tensor-parallel layers. To be read.

Two matrices after each other, the first cut by its outputs and the second by its inputs, need one all-reduce between
ranks and nothing else: two in a block (Shoeybi et al., Megatron-LM, 2019). Embedding, head and loading are the shared
decoder's, which has the same block with the sum, the addition and the norm in one call.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from minisgl.attention import LayerSpec
from minisgl.hooks import hookimpl
from minisgl.kernel.rope import QKNorm, norm_rope_store
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
    """Grouped-query attention over the pool's pages. Attributes with weights are named as in the checkpoint."""

    # lab: shard.attention
    def __init__(self, index: int, config: ModelConfig, ctx: Context):
        super().__init__()
        self.ctx = ctx
        heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        # 1. Whole heads go to a rank, each with its queries, keys and values: it attends without asking anyone.
        self.qkv_proj = LinearQKVMerged(config.hidden_size, heads, kv_heads, dim, ctx, bias=config.attention_bias)
        # 2. Cut by its inputs, which are this rank's heads: every rank has a part of the sum.
        self.o_proj = LinearRowParallel(heads * dim, config.hidden_size, ctx, bias=config.attention_bias)
        # 3. q_norm and k_norm: norms of a head, which is whole on its rank, so every rank has the weights.
        self.q_norm = RMSNorm(dim, config.rms_norm_eps, ctx)
        self.k_norm = RMSNorm(dim, config.rms_norm_eps, ctx)
        # 4. What the pool and the backend see is the heads of this rank, not the model's.
        self.spec = LayerSpec(
            index=index,
            q_heads=self.qkv_proj.q_heads,
            kv_heads=self.qkv_proj.kv_heads,
            head_dim=dim,
            scale=dim**-0.5,
            window=config.window(index),
        )

    def forward(self, x: Tensor, cos_sin: Tensor, out_cache_loc: Tensor) -> Tensor:
        """x [tokens, hidden], the same on every rank; cos_sin [tokens, head_dim]; where [tokens] → as x."""
        spec, pool = self.spec, self.ctx.pool
        assert pool is not None, "the engine sets it before the first forward"
        norm = QKNorm(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)
        # 5. Normalise and rotate queries and keys, and store KV: attention only reads it.
        q = norm_rope_store(
            self.qkv_proj(x), spec.q_heads, spec.kv_heads, norm, cos_sin, pool, spec.index, out_cache_loc
        )
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        self.ctx.attention.forward(spec, q, out)
        # 6. The first all-reduce is in here.
        return self.o_proj(out.flatten(1))

    # lab: end


class MLP(nn.Module):
    """down(silu(gate(x)) · up(x))."""

    # lab: shard.mlp
    def __init__(self, config: ModelConfig, ctx: Context):
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        # 1. Gate and up are cut alike: what is multiplied element by element is on the same rank.
        self.gate_up_proj = LinearColParallelMerged(hidden, (inner, inner), ("gate_proj", "up_proj"), ctx)
        # 2. Down takes just the inner elements that this rank has; the second all-reduce is in it.
        self.down_proj = LinearRowParallel(inner, hidden, ctx)

    def forward(self, x: Tensor) -> Tensor:
        """x [tokens, hidden], the same on every rank → as x."""
        return self.down_proj(silu_and_mul(self.gate_up_proj(x)))

    # lab: end


class Block(nn.Module):
    """One layer: attention, then feed-forward, each on a norm of the residual stream and added to it."""

    # lab: shard.block
    def __init__(self, index: int, config: ModelConfig, ctx: Context):
        super().__init__()
        # 1. Under the checkpoint's names: input_layernorm, self_attn, post_attention_layernorm, mlp.
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, ctx)
        self.self_attn = Attention(index, config, ctx)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, ctx)
        self.mlp = MLP(config, ctx)

    def forward(self, x: Tensor, residual: None, cos_sin: Tensor, out_cache_loc: Tensor) -> tuple[Tensor, None]:
        """x [tokens, hidden] is the whole residual stream, the same on every rank, before and after; ``residual`` is
        None, for blocks that leave sums to their successor."""
        # 2. Every rank has the whole stream, so it is added once, to what was summed over the ranks already.
        x = x + self.self_attn(self.input_layernorm(x), cos_sin, out_cache_loc)
        return x + self.mlp(self.post_attention_layernorm(x)), None

    # lab: end


class Qwen3Plain(Decoder):
    """Dense Qwen3; its checkpoints say Qwen3ForCausalLM."""

    def block(self, index: int) -> nn.Module:
        return Block(index, self.config, self.ctx)


@hookimpl
def minisgl_models() -> Mapping[str, type]:
    return {"Qwen3Plain": Qwen3Plain}
