"""QK-norm, RoPE and the store of keys and values in one launch, in CUDA C++ (`rope.cu`): one warp per head.

`minisgl.attention.AttentionBackend.norm_rope_store` computes the same in torch. The engine runs the Triton kernel
instead, which needs no CUDA compiler; docs/benchmarks/cpp.md compares the two.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from minisgl.plugins.kernels.ops.cpp import load

if TYPE_CHECKING:
    from minisgl.attention import QKNorm
    from minisgl.kvcache.pool import KVPool


@functools.cache
def _compiled() -> Any:
    return load("rope.cu").norm_rope_store


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
    """Compute `minisgl.attention.AttentionBackend.norm_rope_store` with the CUDA C++ kernel.

    Raises ConfigError if the kernel can't be compiled.
    """
    tokens, head_dim = cos_sin.shape
    k, v = pool.layer(layer)
    q = torch.empty((tokens, q_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    q_weight, k_weight, eps = (None, None, 0.0) if norm is None else norm
    _compiled()(qkv, q, k, v, q_weight, k_weight, cos_sin, out_cache_loc, eps)
    return q
