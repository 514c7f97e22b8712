"""Decode attention from the result of the QKV projection, in Triton: one launch, and one that merges the splits.

QK-norm, RoPE and the store of the new token's KV are part of the first launch. Every program of a row computes the new
token's key and value itself, because no program can wait for another one; one program stores them in the pool. There
are two kernels: one for one or two query heads per KV head, and one with tensor cores for more.
`minisgl.plugins.kernels.attention.references.attention` is the torch reference.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from minisgl.plugins.kernels.ops.triton.attention import attend, decode_splits, decode_tile, score_scale
from minisgl.plugins.kernels.ops.triton.device import device_function
from minisgl.plugins.kernels.ops.triton.early import start_next, starts_early, wait_for_previous

if TYPE_CHECKING:
    from minisgl.attention import QKNorm
    from minisgl.plugins.kernels.ops.triton.attention import Heads, Pages

SMALL_GROUP = 2
"""The most query heads per KV head for which `small_group_kernel` was faster than `group_kernel` on an H200."""
SMALL_GROUP_BLOCK = 16
"""KV positions that a program of `small_group_kernel` reads at once."""
MERGED = 32
"""Elements of a head that one program of `merge_kernel` merges."""


@device_function
def norm_rope(x, weight, cos_sin, eps, HALF: tl.constexpr, NORM: tl.constexpr):
    """Return the head at x, normalised and rotated, float32 [2·HALF]; cos_sin points to its cosines and sines."""
    d = tl.arange(0, 2 * HALF)
    pair = (d + HALF) % (2 * HALF)  # the element with which element d is rotated
    y, z = tl.load(x + d).to(tl.float32), tl.load(x + pair).to(tl.float32)
    cos, sin = tl.load(cos_sin + d % HALF), tl.load(cos_sin + HALF + d % HALF)
    if NORM:
        scale = tl.rsqrt(tl.sum(y * y, 0) / (2 * HALF) + eps)
        y *= scale * tl.load(weight + d).to(tl.float32)
        z *= scale * tl.load(weight + pair).to(tl.float32)
    return y * cos + tl.where(d < HALF, -z, z) * sin


@device_function
def norm_rope_heads(x, m, count, weight, cos_sin, eps, HALF: tl.constexpr, NORM: tl.constexpr):
    """Return the heads m [M] after x, normalised and rotated, float32 [M, 2·HALF]; heads from ``count`` on are 0."""
    d = tl.arange(0, 2 * HALF)
    pair = (d + HALF) % (2 * HALF)  # the element with which element d is rotated
    real, x = (m < count)[:, None], x + m[:, None] * (2 * HALF)
    y = tl.load(x + d[None, :], mask=real, other=0.0).to(tl.float32)
    z = tl.load(x + pair[None, :], mask=real, other=0.0).to(tl.float32)
    cos, sin = tl.load(cos_sin + d % HALF), tl.load(cos_sin + HALF + d % HALF)
    if NORM:
        scale = tl.rsqrt(tl.sum(y * y, 1) / (2 * HALF) + eps)[:, None]
        y *= scale * tl.load(weight + d).to(tl.float32)[None, :]
        z *= scale * tl.load(weight + pair).to(tl.float32)[None, :]
    return y * cos[None, :] + tl.where(d < HALF, -z, z) * sin[None, :]


@device_function
def kv_split(seq_len, split, WINDOW: tl.constexpr, SPLITS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the first position of a split of a row's KV, the position after its last one, and the splits in use."""
    first = tl.maximum(seq_len - WINDOW, 0) if WINDOW >= 0 else 0
    share = tl.cdiv(tl.cdiv(seq_len - first, BLOCK_N), SPLITS) * BLOCK_N
    begin = first + split * share
    return begin, tl.minimum(begin + share, seq_len), tl.cdiv(seq_len - first, share)


@device_function
def load_kv(k, v, page, n, stored, stride_page, stride_token, HEAD_DIM: tl.constexpr, PAGE: tl.constexpr):
    """Load the keys and values [N, HEAD_DIM] of positions n [N] in pages [N]; those from ``stored`` on are 0."""
    at = page.to(tl.int64) * stride_page + (n % PAGE) * stride_token
    at = at[:, None] + tl.arange(0, HEAD_DIM)[None, :]
    real = (n < stored)[:, None]
    return tl.load(k + at, mask=real, other=0.0), tl.load(v + at, mask=real, other=0.0)


@triton.jit(do_not_specialize_on_alignment=["out_cache_loc", "req_pool_indices", "seq_lens"])
def small_group_kernel(
    qkv, q_weight, k_weight, cos_sin, out_cache_loc, k, v, partial, partial_top, page_table, req_pool_indices, seq_lens,
    scale, eps, stride_qkv, stride_page, stride_token, stride_head, stride_table,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr,
    NORM: tl.constexpr, SPLITS: tl.constexpr, BLOCK_N: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    """QK-norm, RoPE, the store of the new token's KV, and decode attention. One program: one KV head, one split.

    The keys and values of earlier steps are loaded before the wait: no kernel of this step writes them. The new token's
    key and value come from qkv, and the program of the last split stores them in the pool. A program is one warp, which
    needs no barrier; with one or two queries for each key, a product by tensor cores would not be faster.
    """
    head, row, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    seq_len = tl.load(seq_lens + row)
    begin, end, _ = kv_split(seq_len, split, WINDOW, SPLITS, BLOCK_N)
    row_table = page_table + tl.load(req_pool_indices + row).to(tl.int64) * stride_table
    d, n = tl.arange(0, HEAD_DIM), begin + tl.arange(0, BLOCK_N)
    stored = tl.minimum(end, seq_len - 1)  # positions before this one are in the pool
    k += head * stride_head
    v += head * stride_head
    page = tl.load(row_table + n // PAGE, mask=n < stored, other=0)
    keys, values = load_kv(k, v, page, n, stored, stride_page, stride_token, HEAD_DIM, PAGE)
    page = tl.load(row_table + (n + BLOCK_N) // PAGE, mask=n + BLOCK_N < stored, other=0)
    if EARLY:
        start_next()
        wait_for_previous()
    if begin < end:
        q_heads = tl.num_programs(0) * GROUP
        qkv += row * stride_qkv
        cos_sin += row * HEAD_DIM
        dtype = keys.dtype
        new_key = norm_rope(qkv + (q_heads + head) * HEAD_DIM, k_weight, cos_sin, eps, HEAD_DIM // 2, NORM)
        new_key = new_key.to(dtype)
        new_value = tl.load(qkv + (q_heads + tl.num_programs(0) + head) * HEAD_DIM + d).to(dtype)
        queries = ()
        tops = ()
        totals = ()
        sums = ()
        for g in tl.static_range(GROUP):
            query = norm_rope(qkv + (head * GROUP + g) * HEAD_DIM, q_weight, cos_sin, eps, HEAD_DIM // 2, NORM)
            queries = queries + (query.to(dtype).to(tl.float32)[None, :] * scale,)  # type: ignore[assignment]  # noqa: RUF005
            tops = tops + (tl.full([1], float("-inf"), tl.float32),)  # type: ignore[assignment]  # noqa: RUF005
            totals = totals + (tl.zeros([1], tl.float32),)  # type: ignore[assignment]  # noqa: RUF005
            sums = sums + (tl.zeros([HEAD_DIM], tl.float32),)  # type: ignore[assignment]  # noqa: RUF005
        if end == seq_len:
            loc = tl.load(out_cache_loc + row).to(tl.int64)
            new_at = loc // PAGE * stride_page + loc % PAGE * stride_token + d
            tl.store(k + new_at, new_key)
            tl.store(v + new_at, new_value)
        for _ in tl.range(begin, end, BLOCK_N, num_stages=1):
            is_new, inside = (n == seq_len - 1)[:, None], n < end
            block_keys = tl.where(is_new, new_key[None, :], keys).to(tl.float32)
            block_values = tl.where(is_new, new_value[None, :], values).to(tl.float32)
            n += BLOCK_N  # load keys and values one iteration ahead, and page numbers two iterations ahead
            keys, values = load_kv(k, v, page, n, stored, stride_page, stride_token, HEAD_DIM, PAGE)
            page = tl.load(row_table + (n + BLOCK_N) // PAGE, mask=n + BLOCK_N < stored, other=0)
            new_tops = ()
            new_totals = ()
            new_sums = ()
            for g in tl.static_range(GROUP):
                scores = tl.sum(block_keys * queries[g], 1)
                scores = tl.where(inside, scores, float("-inf"))
                top = tl.maximum(tops[g], tl.max(scores, 0))  # finite: the first position of every block is inside
                weights, rescale = tl.exp2(scores - top), tl.exp2(tops[g] - top)
                new_tops = new_tops + (top,)  # type: ignore[assignment]  # noqa: RUF005
                new_totals = new_totals + (totals[g] * rescale + tl.sum(weights, 0),)  # type: ignore[assignment]  # noqa: RUF005
                new_sums = new_sums + (sums[g] * rescale + tl.sum(block_values * weights[:, None], 0),)  # type: ignore[assignment]  # noqa: RUF005
            tops, totals, sums = new_tops, new_totals, new_sums
        for g in tl.static_range(GROUP):
            part = (row * q_heads + head * GROUP + g) * SPLITS + split
            tl.store(partial + part * HEAD_DIM + d, sums[g] / totals[g])
            tl.store(partial_top + part + tl.arange(0, 1), tops[g] + tl.log2(totals[g]))


@triton.jit(do_not_specialize_on_alignment=["out_cache_loc", "req_pool_indices", "seq_lens"])
def group_kernel(
    qkv, q_weight, k_weight, cos_sin, out_cache_loc, k, v, partial, partial_top, page_table, req_pool_indices, seq_lens,
    scale, eps, stride_qkv, stride_page, stride_token, stride_head, stride_table,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr,
    NORM: tl.constexpr, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    """Compute the same as `small_group_kernel`, with tensor cores. One program: one KV head, one split.

    The first block of keys and values is loaded before the wait, as in `small_group_kernel`. The online softmax of the
    last split begins with the new token, that of the others with nothing.
    """
    head, row, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    seq_len = tl.load(seq_lens + row)
    begin, end, _ = kv_split(seq_len, split, WINDOW, SPLITS, BLOCK_N)
    row_table = page_table + tl.load(req_pool_indices + row).to(tl.int64) * stride_table
    k += head * stride_head
    v += head * stride_head
    stored = tl.minimum(end, seq_len - 1)  # positions before this one are in the pool
    n = begin + tl.arange(0, BLOCK_N)
    page = tl.load(row_table + n // PAGE, mask=n < stored, other=0)
    keys, values = load_kv(k, v, page, n, stored, stride_page, stride_token, HEAD_DIM, PAGE)
    if EARLY:
        start_next()
        wait_for_previous()
    if begin < end:
        kv_heads = tl.num_programs(0)
        qkv += row * stride_qkv
        cos_sin += row * HEAD_DIM
        d, m = tl.arange(0, HEAD_DIM), tl.arange(0, BLOCK_M)
        dtype = k.dtype.element_ty
        queries = norm_rope_heads(
            qkv + head * GROUP * HEAD_DIM, m, GROUP, q_weight, cos_sin, eps, HEAD_DIM // 2, NORM
        ).to(dtype)  # fmt: skip
        new_key = norm_rope(qkv + (kv_heads * GROUP + head) * HEAD_DIM, k_weight, cos_sin, eps, HEAD_DIM // 2, NORM)
        new_key = new_key.to(dtype)
        new_value = tl.load(qkv + (kv_heads * GROUP + kv_heads + head) * HEAD_DIM + d).to(dtype)
        last = end == seq_len
        if last:
            loc = tl.load(out_cache_loc + row).to(tl.int64)
            new_at = loc // PAGE * stride_page + loc % PAGE * stride_token + d
            tl.store(k + new_at, new_key)
            tl.store(v + new_at, new_value)
        score = tl.sum(queries.to(tl.float32) * new_key.to(tl.float32)[None, :], 1) * scale
        top = tl.where(last, score, float("-inf"))
        total = tl.where(last, 1.0, 0.0) + tl.zeros([BLOCK_M], tl.float32)
        acc = tl.where(last, new_value.to(tl.float32), 0.0)[None, :] + tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
        scores = tl.where((n < stored)[None, :], scores, float("-inf"))
        first_top = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - first_top[:, None])
        rescale = tl.exp2(top - first_top)
        acc = tl.dot(weights.to(dtype), values, acc * rescale[:, None], input_precision="ieee")
        total = total * rescale + tl.sum(weights, 1)
        begin += BLOCK_N
        middle = begin + tl.maximum(stored - begin, 0) // BLOCK_N * BLOCK_N
        position = tl.full([BLOCK_M], 0, tl.int32) + (seq_len - 1)
        acc, top, total = attend(
            queries, position, k, v, row_table, begin, middle, stride_page, stride_token, scale,
            acc, first_top, total, PAGE, HEAD_DIM, WINDOW, 0.0, False, BLOCK_N,
        )  # fmt: skip
        acc, top, total = attend(
            queries, position, k, v, row_table, middle, stored, stride_page, stride_token, scale,
            acc, top, total, PAGE, HEAD_DIM, WINDOW, 0.0, True, BLOCK_N,
        )  # fmt: skip
        part = ((row * kv_heads + head) * GROUP + m) * SPLITS + split
        tl.store(partial + part[:, None] * HEAD_DIM + d[None, :], acc / total[:, None], mask=(m < GROUP)[:, None])
        tl.store(partial_top + part, top + tl.log2(total), mask=m < GROUP)


@triton.jit(do_not_specialize_on_alignment=["seq_lens"])
def merge_kernel(
    partial, partial_top, out, seq_lens,
    HEAD_DIM: tl.constexpr, WINDOW: tl.constexpr, SPLITS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    EARLY: tl.constexpr = False,
):  # fmt: skip
    """Merge the results of the splits, weighted by their sums of exponentials.

    One program: one row, one query head, BLOCK_D elements of it. The number of splits in use follows from the row's
    length, so their results are loaded without looking first.
    """
    row, head, d = tl.program_id(0), tl.program_id(1), tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    _, _, splits = kv_split(tl.load(seq_lens + row), 0, WINDOW, SPLITS, BLOCK_N)
    if EARLY:
        start_next()
        wait_for_previous()
    split = tl.arange(0, SPLITS)
    part = (row * tl.num_programs(1) + head) * SPLITS + split
    top = tl.load(partial_top + part, mask=split < splits, other=float("-inf"))
    parts = tl.load(partial + part[:, None] * HEAD_DIM + d[None, :], mask=(split < splits)[:, None], other=0.0)
    weights = tl.exp2(top - tl.max(top, 0))
    merged = tl.sum(parts * weights[:, None], 0) / tl.sum(weights, 0)
    tl.store(out + (row * tl.num_programs(1) + head) * HEAD_DIM + d, merged.to(out.dtype.element_ty))


# ---- launches ----------------------------------------------------------------------------------------------


def serves_attention(heads: Heads) -> bool:
    """Return whether `attention` supports these heads: a head size of 16, 32, 64 or 128, no soft cap, no sinks."""
    return heads.head_dim in (16, 32, 64, 128) and not heads.soft_cap and heads.sinks is None


def attention_splits(rows: int, heads: Heads, programs: int) -> int:
    """Return the number of splits of each row's KV, a power of two; rows · kv_heads · splits is at most 2 · programs.

    ``programs`` is the number of programs of four warps that fill the GPU. A program of `small_group_kernel` is one
    warp, so there are twice as many, and up to 128 splits instead of 64.
    """
    if heads.group > SMALL_GROUP:
        return decode_splits(rows, heads.kv_heads, programs)
    splits = max(1, min(128, 2 * programs // (rows * heads.kv_heads)))
    return 1 << (splits.bit_length() - 1)


def attention(
    qkv: Tensor, norm: QKNorm | None, cos_sin: Tensor, out_cache_loc: Tensor, pages: Pages, heads: Heads,
    splits: int, partial: Tensor, out: Tensor,
) -> None:  # fmt: skip
    """Launch attention of one decode token per row from the result of the QKV projection, and the merge of the splits.

    qkv is [rows, (q_heads + 2·kv_heads)·head_dim], out [rows, q_heads, head_dim]; ``partial`` is float32 scratch memory
    of at least rows · q_heads · splits · (head_dim + 1) elements. `minisgl.plugins.kernels.attention.references`
    has the torch reference.
    """
    rows, dim = qkv.shape[0], heads.head_dim
    tops = partial[rows * heads.q_heads * splits * dim :]
    q_weight, k_weight, eps = (qkv, qkv, 0.0) if norm is None else norm
    early = starts_early(qkv)
    if heads.group <= SMALL_GROUP:
        kernel, block, tile = small_group_kernel, SMALL_GROUP_BLOCK, {"num_warps": 1}
    else:
        _, block, warps, stages = best = decode_tile(heads.group, dim, qkv.dtype, splits)
        kernel, tile = group_kernel, {"BLOCK_M": best.m, "num_warps": warps, "num_stages": stages}
    kernel[(heads.kv_heads, rows, splits)](
        qkv, q_weight, k_weight, cos_sin, out_cache_loc, pages.k, pages.v, partial, tops,
        pages.page_table, pages.req_pool_indices, pages.seq_lens, score_scale(heads), eps,
        qkv.stride(0), *pages.k.stride()[:3], pages.page_table.stride(0),
        GROUP=heads.group, HEAD_DIM=dim, PAGE=pages.k.shape[1], WINDOW=heads.window, NORM=norm is not None,
        SPLITS=splits, BLOCK_N=block, **tile, **early,
    )  # fmt: skip
    merged = min(MERGED, dim)
    merge_kernel[(rows, heads.q_heads, dim // merged)](
        partial, tops, out, pages.seq_lens,
        HEAD_DIM=dim, WINDOW=heads.window, SPLITS=splits, BLOCK_N=block, BLOCK_D=merged, num_warps=4, **early,
    )  # fmt: skip
