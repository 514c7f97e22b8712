"""RoPE with other parameters in layers with a sliding window than in layers with full attention: OLMo 3, Gemma 3.

Both tables are concatenated and passed to all layers. Each layer uses the columns of its own type.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from minisgl.layers import AttentionLayer, RoPE, RopeConfig

TYPES = ("full_attention", "sliding_attention")
"""The types in the order of their tables."""


class RoPEByLayerType(nn.Module):
    """The tables of both layer types, [positions, 2·head_dim] float32."""

    def __init__(self, ropes: Mapping[str, RopeConfig], head_dim: int, positions: int, device: torch.device):
        super().__init__()
        self.cos_sin = torch.cat([RoPE(ropes[kind], head_dim, positions, device).cos_sin for kind in TYPES], dim=-1)

    def forward(self, positions: Tensor) -> Tensor:
        """Return both tables' rows [n, 2·head_dim], float32, of positions [n]."""
        return self.cos_sin.index_select(0, positions)


class TypedAttention(AttentionLayer):
    """Attention of a layer of type ``kind``, which selects its RoPE; its window is an option of its own."""

    def __init__(self, index: int, hidden_size: int, *heads: Any, kind: str, **options: Any):
        super().__init__(index, hidden_size, *heads, **options)
        self.table = TYPES.index(kind)

    def heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values of ``qkv``, each [tokens, heads·head_dim]."""
        dim = self.spec.head_dim
        q, k, v = qkv.split([self.spec.q_heads * dim, self.spec.kv_heads * dim, self.spec.kv_heads * dim], dim=-1)
        return q, k, v

    def attend(self, qkv: Tensor, cos_sin: Tensor, out_cache_loc: Tensor) -> Tensor:
        """Compute `AttentionLayer.attend`. ``cos_sin`` is [tokens, 2·head_dim]."""
        dim = self.spec.head_dim
        own = cos_sin[:, self.table * dim : (self.table + 1) * dim].contiguous()
        return super().attend(qkv, own, out_cache_loc)
