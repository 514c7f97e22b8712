"""OLMo 3: norms after each sub-layer, QK-norm over whole projections, RoPE by layer type. Team OLMo, 2025."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from minisgl.hooks import hookimpl
from minisgl.layers import AttentionLayer, Context, RMSNorm, RopeConfig
from minisgl.layers.weight_shards import WeightShard
from minisgl.models.config import ModelConfig
from minisgl.models.decoder import Decoder
from minisgl.plugins.models.layer_types import RoPEByLayerType, TypedAttention


class ProjectionNorm(nn.Module):
    """RMSNorm over all heads of a projection. This rank has ``here`` of the ``total`` features, from ``start`` on."""

    def __init__(self, total: int, start: int, here: int, eps: float, ctx: Context):
        super().__init__()
        self.comm, self.total, self.start, self.eps = ctx.comm, total, start, eps
        self.weight = ctx.parameter(here)

    def weight_shards(self, prefix: str, names: frozenset[str] | None) -> Iterator[WeightShard]:
        """Yield the weights of this rank's features."""
        yield WeightShard.part(f"{prefix}weight", (self.total,), 0, self.start, self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x [tokens, here]; the mean is over the features of all ranks.

        Several ranks may have the same KV head. All heads are then on equally many ranks, so the mean is that of each
        head counted once.
        """
        wide = x.float()
        squares = self.comm.all_reduce(wide.square().sum(-1, keepdim=True))
        count = self.comm.size * self.weight.numel()
        return (self.weight.float() * wide * torch.rsqrt(squares / count + self.eps)).to(x.dtype)


class OlmoAttention(TypedAttention):
    """Attention with the table of the layer's type, and norms of the whole query and key projections."""

    def __init__(self, index: int, kind: str, config: ModelConfig, ctx: Context):
        c, bias = config, config.attention_bias
        heads = (c.num_attention_heads, c.num_key_value_heads, c.head_dim)
        window = c.need("sliding_window") if kind == "sliding_attention" else -1
        super().__init__(index, c.hidden_size, *heads, ctx, kind=kind, window=window, qkv_bias=bias, out_bias=bias)
        # Of each part of the merged projection: rows of all ranks, this rank's first row, number of its rows.
        q, k, _ = (part[1:] for part in self.qkv_proj.parts)
        self.q_norm = ProjectionNorm(*q, c.rms_norm_eps, ctx)  # type: ignore[assignment]
        self.k_norm = ProjectionNorm(*k, c.rms_norm_eps, ctx)  # type: ignore[assignment]

    def attend(self, qkv: Tensor, cos_sin: Tensor, out_cache_loc: Tensor) -> Tensor:
        """Normalise queries and keys, then compute `TypedAttention.attend`."""
        q, k, v = self.heads(qkv)
        return super().attend(torch.cat((self.q_norm(q), self.k_norm(k), v), dim=-1), cos_sin, out_cache_loc)


class OlmoLayer(nn.Module):
    """One layer: each sub-layer's whole sum is normalised, then added to x [tokens, hidden]."""

    def __init__(self, attention: AttentionLayer, mlp: nn.Module, config: ModelConfig, ctx: Context):
        super().__init__()
        self.comm, self.self_attn, self.mlp = ctx.comm, attention, mlp
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, ctx)
        self.post_feedforward_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, ctx)

    def forward(self, x: Tensor, residual: None, cos_sin: Tensor, out_cache_loc: Tensor) -> tuple[Tensor, None]:
        """Compute the layer of x [tokens, hidden], the whole residual stream; ``residual`` stays None."""
        y = self.comm.all_reduce(self.self_attn(x, cos_sin, out_cache_loc))
        x = x + self.post_attention_layernorm(y)
        return x + self.post_feedforward_layernorm(self.comm.all_reduce(self.mlp(x))), None


class Olmo3ForCausalLM(Decoder):
    """OLMo 3: `Decoder` with its own layers and a table for each layer type."""

    model_type = "olmo3"
    defaults: ClassVar[Mapping[str, Any]] = {
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "sliding_window": 4096,
        "layer_types": None,
        "rope_parameters": None,
    }

    def rotary_embedding(self) -> nn.Module:
        """Build both tables.

        Before transformers 5, config.json had one set of parameters, and its scaling was for full attention only.
        """
        c = self.config
        plain = RopeConfig(rope_theta=c.rope.rope_theta)
        ropes = c.rope_by_layer_type or {"full_attention": c.rope, "sliding_attention": plain}
        return RoPEByLayerType(ropes, c.head_dim, c.max_len, self.ctx.device)

    def block(self, index: int) -> nn.Module:
        """Build layer ``index``: without ``layer_types``, every fourth layer has full attention."""
        c = self.config
        kind = c.layer_type(index) or ("full_attention" if index % 4 == 3 else "sliding_attention")
        return OlmoLayer(OlmoAttention(index, kind, c, self.ctx), self.mlp(index), c, self.ctx)


@hookimpl
def minisgl_models() -> Mapping[str, type]:
    """Register the architecture."""
    return {"Olmo3ForCausalLM": Olmo3ForCausalLM}
