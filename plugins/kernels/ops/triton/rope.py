"""QK-norm, RoPE and the store of keys and values in one Triton launch.

One program handles BLOCK_H heads of one token: it writes queries to the output, and keys and values to the token's KV
location in the pool. `minisgl.attention.AttentionBackend.norm_rope_store` computes the same in torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl.plugins.kernels.ops.triton.early import start_next, starts_early, wait_for_previous

if TYPE_CHECKING:
    from minisgl.attention import QKNorm
    from minisgl.kvcache.pool import KVPool


@triton.jit(do_not_specialize_on_alignment=["out_cache_loc"])
def norm_rope_store_kernel(
    qkv, q_out, k_pool, v_pool, q_weight, k_weight, cos_sin, out_cache_loc, eps,
    stride_qkv, stride_page, stride_token, stride_head,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, PAGE: tl.constexpr, NORM: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_HALF: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    """Normalise, rotate and store BLOCK_H heads of one token; heads are queries, then keys, then values."""
    if EARLY:
        start_next()
        wait_for_previous()
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
    i = tl.arange(0, BLOCK_HALF)[None, :]
    is_q, is_v = head < Q_HEADS, head >= Q_HEADS + KV_HEADS
    pair = i < HALF
    real = (head < Q_HEADS + 2 * KV_HEADS) & pair

    # Dimension i of a head is rotated with dimension i + HALF, so the program keeps the two halves in separate tensors.
    at = qkv + token * stride_qkv + head * (2 * HALF) + i
    x1 = tl.load(at, mask=real, other=0.0).to(tl.float32)
    x2 = tl.load(at + HALF, mask=real, other=0.0).to(tl.float32)
    y1, y2 = x1, x2
    if NORM:
        square = tl.sum(x1 * x1, 1) + tl.sum(x2 * x2, 1)
        scale = tl.rsqrt(square / (2 * HALF) + eps)[:, None]
        q1, k1 = tl.load(q_weight + i, mask=pair, other=0.0), tl.load(k_weight + i, mask=pair, other=0.0)
        q2, k2 = tl.load(q_weight + HALF + i, mask=pair, other=0.0), tl.load(k_weight + HALF + i, mask=pair, other=0.0)
        y1 = x1 * scale * tl.where(is_q, q1, k1).to(tl.float32)
        y2 = x2 * scale * tl.where(is_q, q2, k2).to(tl.float32)
    cos = tl.load(cos_sin + token * (2 * HALF) + i, mask=pair, other=0.0)
    sin = tl.load(cos_sin + token * (2 * HALF) + HALF + i, mask=pair, other=0.0)
    y1, y2 = y1 * cos - y2 * sin, y2 * cos + y1 * sin

    q_at = q_out + (token * Q_HEADS + head) * (2 * HALF) + i
    tl.store(q_at, y1.to(q_out.dtype.element_ty), mask=real & is_q)
    tl.store(q_at + HALF, y2.to(q_out.dtype.element_ty), mask=real & is_q)
    loc = tl.load(out_cache_loc + token).to(tl.int64)
    offset = loc // PAGE * stride_page + loc % PAGE * stride_token
    k_at = k_pool + offset + (head - Q_HEADS) * stride_head + i
    is_k = (head >= Q_HEADS) & (head < Q_HEADS + KV_HEADS)
    tl.store(k_at, y1.to(k_pool.dtype.element_ty), mask=real & is_k)
    tl.store(k_at + HALF, y2.to(k_pool.dtype.element_ty), mask=real & is_k)
    v_at = v_pool + offset + (head - Q_HEADS - KV_HEADS) * stride_head + i
    tl.store(v_at, x1.to(v_pool.dtype.element_ty), mask=real & is_v)
    tl.store(v_at + HALF, x2.to(v_pool.dtype.element_ty), mask=real & is_v)


def norm_rope_store(
    qkv: Tensor,
    q_heads: int,
    kv_heads: int,
    norm: QKNorm | None,
    cos_sin: Tensor,
    pool: KVPool,
    layer: int,
    out_cache_loc: Tensor,
    warps: int | None = None,
) -> Tensor:
    """Compute `minisgl.attention.AttentionBackend.norm_rope_store` on a GPU.

    ``warps`` is Triton's num_warps, on which the order of sums may depend. None: the fastest for the number of tokens.
    """
    tokens, head_dim = cos_sin.shape
    k, v = pool.layer(layer)
    q = torch.empty((tokens, q_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    q_weight, k_weight, eps = (q, q, 0.0) if norm is None else norm
    heads = q_heads + 2 * kv_heads
    block = min(16, triton.next_power_of_2(heads))
    norm_rope_store_kernel[(tokens, triton.cdiv(heads, block))](
        qkv, q, k, v, q_weight, k_weight, cos_sin, out_cache_loc, eps, qkv.stride(0), *k.stride()[:3],
        Q_HEADS=q_heads, KV_HEADS=kv_heads, HALF=head_dim // 2, PAGE=pool.page_size, NORM=norm is not None,
        BLOCK_H=block, BLOCK_HALF=triton.next_power_of_2(head_dim // 2), num_warps=warps or (2 if tokens > 1024 else 4),
        **starts_early(qkv),
    )  # fmt: skip
    return q
