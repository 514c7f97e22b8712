"""QK-norm, RoPE and the KV store: all that is computed between the QKV projection and attention.

The three are one function because on a GPU they are one Triton launch. This module has the torch reference, which a CPU
runs, unless the attention backend brought a compiled version (`minisgl.plugins.kernels.ops.cpp.attention`).
`minisgl.models.plain` shows the same steps inside a whole decoder layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from minisgl.kvcache.pool import KVPool


class QKNorm(NamedTuple):
    """The weights and epsilon of the RMSNorm of each query and key head before RoPE; q and k are [head_dim]."""

    q: Tensor
    k: Tensor
    eps: float


def rotate(x: Tensor, cos_sin: Tensor) -> Tensor:
    """Apply RoPE to x [tokens, heads, head_dim]; cos_sin [tokens, head_dim] is float32, cosines first.

    Dimension i is rotated together with dimension i + head_dim/2, as in Hugging Face's checkpoints. Su et al.,
    RoFormer, 2021.
    """
    cos, sin = cos_sin.unsqueeze(1).chunk(2, dim=-1)
    wide = x.float()
    x1, x2 = wide.chunk(2, dim=-1)
    out = torch.empty_like(wide)
    o1, o2 = out.chunk(2, dim=-1)
    torch.mul(x1, cos, out=o1).addcmul_(x2, sin, value=-1)
    torch.mul(x2, cos, out=o2).addcmul_(x1, sin)
    return out.to(x.dtype)


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
    """Normalise and rotate queries and keys, store keys and values in the pool, and return the queries.

    qkv [tokens, (q_heads + 2·kv_heads)·head_dim]; cos_sin [tokens, head_dim] float32; out_cache_loc [tokens] is
    page·page_size + offset of each token. ``norm`` None: the model has no QK-norm. Returns [tokens, q_heads, head_dim].
    """
    if qkv.is_cuda:
        from minisgl.plugins.kernels.ops.triton import rope as triton

        return triton.norm_rope_store(qkv, q_heads, kv_heads, norm, cos_sin, pool, layer, out_cache_loc)
    if pool.norm_rope_store is not None:
        return pool.norm_rope_store(qkv, q_heads, kv_heads, norm, cos_sin, pool, layer, out_cache_loc)
    return norm_rope_store_torch(qkv, q_heads, kv_heads, norm, cos_sin, pool, layer, out_cache_loc)


def norm_rope_store_torch(
    qkv: Tensor,
    q_heads: int,
    kv_heads: int,
    norm: QKNorm | None,
    cos_sin: Tensor,
    pool: KVPool,
    layer: int,
    out_cache_loc: Tensor,
) -> Tensor:
    """Compute `norm_rope_store` in plain torch: the torch reference."""
    tokens, head_dim = qkv.shape[0], cos_sin.shape[-1]
    heads = qkv.view(tokens, q_heads + 2 * kv_heads, head_dim)
    qk, v = heads[:, : q_heads + kv_heads], heads[:, q_heads + kv_heads :]
    if norm is not None:
        q = F.rms_norm(qk[:, :q_heads], (head_dim,), norm.q, norm.eps)
        k = F.rms_norm(qk[:, q_heads:], (head_dim,), norm.k, norm.eps)
        qk = torch.cat((q, k), dim=1)
    qk = rotate(qk, cos_sin)
    pool.store(layer, qk[:, q_heads:], v, out_cache_loc)
    return qk[:, :q_heads]
