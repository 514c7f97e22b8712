"""OLMo 3: norms after each sub-layer, QK-norm over whole projections, RoPE by layer type. Team OLMo, 2025."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from minisgl.hooks import hookimpl
from minisgl.layers import AttentionLayer, Context, RMSNorm, RoPE, RopeConfig
from minisgl.layers.weight_shards import WeightShard
from minisgl.models.config import ModelConfig
from minisgl.models.decoder import Decoder

TYPES = ("full_attention", "sliding_attention")


class ProjectionNorm(nn.Module):
    """RMSNorm over all heads of a projection. This rank has ``here`` of the ``total`` features, from ``start`` on."""

    def __init__(self, total: int, start: int, here: int, eps: float, ctx: Context):
        super().__init__()
        self.comm, self.total, self.start, self.eps = ctx.comm, total, start, eps
        self.weight = nn.Parameter(torch.empty(here, dtype=ctx.dtype, device=ctx.device), requires_grad=False)

    def weight_shards(self, prefix: str, names: frozenset[str] | None) -> Iterator[WeightShard]:
        yield WeightShard.part(f"{prefix}weight", (self.total,), 0, self.start, self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """x [tokens, here]; the mean is over the features of all ranks. KV heads may be on several ranks each."""
        wide = x.float()
        squares = self.comm.all_reduce(wide.square().sum(-1, keepdim=True))
        count = self.comm.size * self.weight.numel()
        return (self.weight.float() * wide * torch.rsqrt(squares / count + self.eps)).to(x.dtype)


class OlmoRoPE(nn.Module):
    """The tables of both layer types, side by side: [tokens, 2·head_dim]."""

    def __init__(self, config: ModelConfig, ctx: Context):
        super().__init__()
        # Before transformers 5, config.json has one set of parameters, and its scaling is for full attention only.
        plain = RopeConfig(rope_theta=config.rope.rope_theta)
        ropes = config.rope_by_layer_type or {"full_attention": config.rope, "sliding_attention": plain}
        self.tables = [RoPE(ropes[kind], config.head_dim, config.max_len, ctx.device) for kind in TYPES]

    def forward(self, positions: Tensor) -> Tensor:
        return torch.cat([table(positions) for table in self.tables], dim=-1)


class OlmoAttention(AttentionLayer):
    """Attention with the table of the layer's type, and norms of the whole query and key projections."""

    def __init__(self, index: int, kind: str, config: ModelConfig, ctx: Context):
        c, dim = config, config.head_dim
        heads = (c.num_attention_heads, c.num_key_value_heads, dim)
        window = c.need("sliding_window") if kind == "sliding_attention" else -1
        bias = c.attention_bias
        super().__init__(index, c.hidden_size, *heads, ctx, qkv_bias=bias, out_bias=bias, window=window)
        self.table = TYPES.index(kind)
        # The parts of the merged projection: name, rows of all ranks, this rank's first row, number of its rows.
        (_, *q), (_, *k), _ = self.qkv_proj.parts
        self.q_norm = ProjectionNorm(*q, c.rms_norm_eps, ctx)
        self.k_norm = ProjectionNorm(*k, c.rms_norm_eps, ctx)

    def attend(self, qkv: Tensor, cos_sin: Tensor, out_cache_loc: Tensor) -> Tensor:
        dim = self.spec.head_dim
        q, k, v = qkv.split([self.spec.q_heads * dim, self.spec.kv_heads * dim, self.spec.kv_heads * dim], dim=-1)
        own = cos_sin[:, self.table * dim : (self.table + 1) * dim].contiguous()
        return super().attend(torch.cat((self.q_norm(q), self.k_norm(k), v), dim=-1), own, out_cache_loc)


class OlmoLayer(nn.Module):
    """One layer: each sub-layer's whole sum is normalized, then added to x [tokens, hidden]."""

    def __init__(self, attention: AttentionLayer, mlp: nn.Module, config: ModelConfig, ctx: Context):
        super().__init__()
        self.comm, self.self_attn, self.mlp = ctx.comm, attention, mlp
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, ctx)
        self.post_feedforward_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, ctx)

    def forward(self, x: Tensor, residual: None, cos_sin: Tensor, out_cache_loc: Tensor) -> tuple[Tensor, None]:
        y = self.comm.all_reduce(self.self_attn(x, cos_sin, out_cache_loc))
        x = x + self.post_attention_layernorm(y)
        return x + self.post_feedforward_layernorm(self.comm.all_reduce(self.mlp(x))), None


class Olmo3ForCausalLM(Decoder):
    """`Decoder` with OLMo 3's layers and tables."""

    model_type = "olmo3"
    defaults: ClassVar[Mapping[str, Any]] = {
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "sliding_window": 4096,
        "layer_types": None,
        "rope_parameters": None,
    }

    def rotary_embedding(self) -> nn.Module:
        return OlmoRoPE(self.config, self.ctx)

    def block(self, index: int) -> nn.Module:
        c = self.config
        kind = c.layer_type(index) or ("full_attention" if index % 4 == 3 else "sliding_attention")
        return OlmoLayer(OlmoAttention(index, kind, c, self.ctx), self.mlp(index), c, self.ctx)


@hookimpl
def minisgl_models() -> Mapping[str, type]:
    return {"Olmo3ForCausalLM": Olmo3ForCausalLM}
