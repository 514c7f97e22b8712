"""Qwen3's decoder layer over ranks. In long steps, the last sum of a layer is computed in two halves."""

from __future__ import annotations

from collections.abc import Mapping

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

LONG = 12
"""Tokens of a step from which on the feed-forward's result is summed in halves: the first one arrives earlier."""


class Attention(nn.Module):
    """Grouped-query attention with this rank's heads."""

    def __init__(self, index: int, config: ModelConfig, ctx: Context):
        super().__init__()
        self.ctx = ctx
        heads, dim = config.num_attention_heads, config.head_dim
        self.qkv_proj = LinearQKVMerged(config.hidden_size, heads, config.num_key_value_heads, dim, ctx)
        self.o_proj = LinearRowParallel(heads * dim, config.hidden_size, ctx)
        self.q_norm = RMSNorm(dim, config.rms_norm_eps, ctx)
        self.k_norm = RMSNorm(dim, config.rms_norm_eps, ctx)
        own = self.qkv_proj.q_heads, self.qkv_proj.kv_heads, dim
        self.spec = LayerSpec(index, *own, scale=dim**-0.5, window=config.window(index))

    def forward(self, x: Tensor, cos_sin: Tensor, out_cache_loc: Tensor) -> Tensor:
        """Compute attention of x [tokens, hidden]."""
        attention = self.ctx.attention
        norm = QKNorm(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)
        q = attention.norm_rope_store(self.spec, self.qkv_proj(x), norm, cos_sin, out_cache_loc)
        out = torch.empty_like(q)
        attention.forward(self.spec, q, out)
        projected: Tensor = self.o_proj(out.flatten(1))
        return projected


class FeedForward(nn.Module):
    """The gated feed-forward network: down(silu(gate(x)) · up(x))."""

    def __init__(self, config: ModelConfig, ctx: Context):
        super().__init__()
        self.comm = ctx.comm
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_up_proj = LinearColParallelMerged(hidden, (inner, inner), ("gate_proj", "up_proj"), ctx)
        self.down_proj = LinearRowParallel(inner, hidden, ctx, reduce=False)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the network for x [tokens, hidden]."""
        out: Tensor = self.down_proj(silu_and_mul(self.gate_up_proj(x)))
        if self.comm.size > 1 and len(x) < LONG:
            out = self.comm.all_reduce(out)
        return out


class Layer(nn.Module):
    """One decoder layer. Every rank has the whole residual stream."""

    def __init__(self, index: int, config: ModelConfig, ctx: Context):
        super().__init__()
        self.comm = ctx.comm
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, ctx)
        self.self_attn = Attention(index, config, ctx)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, ctx)
        self.mlp = FeedForward(config, ctx)

    def forward(self, x: Tensor, residual: None, cos_sin: Tensor, out_cache_loc: Tensor) -> tuple[Tensor, None]:
        """Compute the layer for the residual stream x [tokens, hidden]."""
        x = x + self.self_attn(self.input_layernorm(x), cos_sin, out_cache_loc)
        out = self.mlp(self.post_attention_layernorm(x))
        if self.comm.size > 1 and len(x) >= LONG:
            out = torch.cat([self.comm.all_reduce(half.contiguous()) for half in out.tensor_split(2)])
        return x + out, None


class Halves(Decoder):
    """Dense Qwen3."""

    model_type = "qwen3"

    def block(self, index: int) -> nn.Module:
        """Build layer ``index``."""
        return Layer(index, self.config, self.ctx)


@hookimpl
def minisgl_models() -> Mapping[str, type]:
    """Register the architecture."""
    return {"Museum": Halves}
