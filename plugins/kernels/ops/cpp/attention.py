"""Attention of few query tokens per row over KV pages on a CPU, and the KV store before it, in C++.

The source is `attention.cpp`, compiled at first use.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from minisgl.plugins.kernels.ops.cpp import CPU, load
from minisgl.utils.launch import one_launch

if TYPE_CHECKING:
    from torch import Tensor

    from minisgl.attention import AttnBatch, LayerSpec, QKNorm
    from minisgl.kvcache.pool import KVPool

HEAD_DIM_MULTIPLE = 16
"""`paged_attention` computes heads whose size is a multiple of this number."""


@functools.cache
def compiled() -> Any:
    """Compile and load the library. Raises `ConfigError` if that is not possible here."""
    return load(*CPU, native=True)


def paged_attention(q: Tensor, out: Tensor, keys: Tensor, values: Tensor, batch: AttnBatch, layer: LayerSpec) -> None:
    """Compute attention of the rows of ``batch``, and write it to ``out``.

    q and out are [tokens, q_heads, head_dim]; keys and values are one layer of the pool, [pages, page_size, kv_heads,
    head_dim]. All four are float32 or all four bfloat16; sums are in float32. The cost grows with the product of
    query tokens and positions of each row, so the function is meant for rows of few query tokens.
    """
    sinks = torch.empty(0) if layer.sinks is None else layer.sinks.float()
    compiled().paged_attention(
        q,
        out,
        keys,
        values,
        batch.page_table,
        batch.req_pool_indices,
        batch.seq_lens,
        batch.cu_seqlens_q,
        layer.scale,
        layer.window,
        layer.soft_cap,
        sinks,
        torch.get_num_threads(),
    )


@one_launch
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
    """Compute `minisgl.attention.AttentionBackend.norm_rope_store` in C++: float32 or bfloat16, pool layout NHD."""
    tokens, head_dim = cos_sin.shape
    keys, values = pool.layer(layer)
    q = torch.empty((tokens, q_heads, head_dim), dtype=qkv.dtype)
    none = q.view(-1)[:0]
    q_weight, k_weight, eps = (none, none, 0.0) if norm is None else norm
    compiled().norm_rope_store(
        qkv, q, keys, values, q_weight, k_weight, cos_sin, out_cache_loc.long(), eps, torch.get_num_threads()
    )
    return q
