"""Plain versions of the attention kernels, with the arguments of the kernels: for tests and benchmarks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from minisgl.attention import AttentionBackend, LayerSpec, QKNorm

if TYPE_CHECKING:
    from torch import Tensor

    from minisgl.kvcache.pool import KVPool


def norm_rope_store(
    qkv: Tensor,
    q_heads: int,
    kv_heads: int,
    norm: QKNorm | None,
    cos_sin: Tensor,
    pool: KVPool,
    layer: int,
    out_cache_loc: Tensor,
) -> Tensor:
    """Compute `AttentionBackend.norm_rope_store`, which describes the arguments. ``layer`` is the layer's index."""
    backend, spec = AttentionBackend(), LayerSpec(layer, q_heads, kv_heads, cos_sin.shape[-1], 1.0)
    backend.bind(pool, [spec], ())
    return backend.norm_rope_store(spec, qkv, norm, cos_sin, out_cache_loc)


def attention(
    qkv: Tensor,
    q_heads: int,
    kv_heads: int,
    norm: QKNorm | None,
    cos_sin: Tensor,
    pool: KVPool,
    layer: int,
    out_cache_loc: Tensor,
    locations: list[Tensor],
    scale: float,
) -> Tensor:
    """Return attention [rows, q_heads, head_dim] of one decode token per row; stores the tokens' KV in the pool.

    ``locations`` lists the KV locations that each row attends to, page·page_size + offset, the new token's included.
    See `norm_rope_store` for the other arguments.
    """
    q = norm_rope_store(qkv, q_heads, kv_heads, norm, cos_sin, pool, layer, out_cache_loc)
    out = torch.empty_like(q)
    k, v = (t.flatten(0, 1) for t in pool.layer(layer))
    for row, where in enumerate(locations):
        keys, values = (t[where].repeat_interleave(q_heads // kv_heads, dim=1) for t in (k, v))  # [n, heads, dim]
        weights = torch.einsum("hd,nhd->hn", q[row], keys).mul(scale).softmax(dim=-1)
        out[row] = torch.einsum("hn,nhd->hd", weights, values)
    return out
