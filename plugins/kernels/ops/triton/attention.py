"""Paged attention in Triton: decode with split KV, and extend (whole prompts, chunks, rows with a cached prefix).

Dao, FlashAttention-2, 2023 (extend); Dao et al., Flash-Decoding for long-context inference, 2023 (decode). The query
heads that share a KV head are packed into one tile, so that the tile reads keys and values once for all of them: row m
of a tile is query ``m // GROUP``, head ``m % GROUP`` of the KV head's group. The kernels know tensors only, neither
requests nor page owners.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl.plugins.kernels.ops.fp8 import QuantizedRows
from minisgl.plugins.kernels.ops.triton.device import device_function
from minisgl.plugins.kernels.ops.triton.early import start_next, starts_early, wait_for_previous
from minisgl.plugins.kernels.ops.triton.quantize import GROUP as GROUP_SIZE
from minisgl.plugins.kernels.ops.triton.quantize import store_quantized

LOG2_E = tl.constexpr(1.4426950408889634)


@device_function
def attend(
    q, position, k, v, row_table, begin, end, stride_page, stride_token, scale, acc, top, total,
    PAGE: tl.constexpr, HEAD_DIM: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr,
    MASKED: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Attend to the KV positions [begin, end) block by block, with an online softmax (one pass over keys and values).

    q is [M, D]; position [M] is each query's own position; k and v point to one KV head; row_table is one row of the
    page table. The state of the online softmax is passed in and returned: top [M] is the largest score so far, total
    [M] the sum of the weights 2^(score - top), acc [M, D] the sum of the values with these weights. Scores are
    multiplied by log2(e), so that 2^x replaces e^x. Without MASKED, every query sees every position from begin to end,
    and end - begin is a multiple of BLOCK_N.
    """
    d = tl.arange(0, q.shape[1])
    for start in range(begin, end, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        inside = n < end
        if MASKED:
            page = tl.load(row_table + n // PAGE, mask=inside, other=0)
        else:
            page = tl.load(row_table + n // PAGE)
        offset = page.to(tl.int64) * stride_page + (n % PAGE) * stride_token
        k_at, v_at = k + offset[None, :] + d[:, None], v + offset[:, None] + d[None, :]
        if MASKED or q.shape[1] > HEAD_DIM:
            # Memory past the end of the row's tokens may hold NaN. Read it as 0: masking alone would give 0·NaN = NaN.
            keys = tl.load(k_at, mask=inside[None, :] & (d[:, None] < HEAD_DIM), other=0.0)
        else:
            keys = tl.load(k_at)
        scores = tl.dot(q, keys.to(q.dtype), input_precision="ieee") * scale
        if SOFT_CAP > 0.0:  # cap·tanh(score / cap); scale already includes 1 / cap
            scores = SOFT_CAP * LOG2_E * (1.0 - 2.0 / (1.0 + tl.exp(2.0 * scores)))
        if MASKED:
            seen = inside[None, :] & (n[None, :] <= position[:, None])
            if WINDOW >= 0:
                seen = seen & (n[None, :] > position[:, None] - WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        # A query that has seen no position yet has top -inf; subtract 0 instead, because -inf - -inf is NaN.
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(scores - base[:, None])
        rescale = tl.exp2(top - base)
        if MASKED or q.shape[1] > HEAD_DIM:
            values = tl.load(v_at, mask=inside[:, None] & (d[None, :] < HEAD_DIM), other=0.0)
        else:
            values = tl.load(v_at)
        acc = tl.dot(weights.to(q.dtype), values.to(q.dtype), acc * rescale[:, None], input_precision="ieee")
        total = total * rescale + tl.sum(weights, 1)
        top = new_top
    return acc, top, total


@device_function
def sink_weight(sinks, query_head, real, top):
    """Return what the attention sinks of ``query_head`` [M] add to the sums of weights, whose largest score is top."""
    return tl.exp2(tl.load(sinks + query_head, mask=real, other=0.0).to(tl.float32) * LOG2_E - top)


@triton.jit(do_not_specialize_on_alignment=["req_pool_indices", "seq_lens", "order", "shared_prefix_len"])
def decode_kernel(
    q, k, v, out, partial, partial_top, page_table, req_pool_indices, seq_lens, order, shared_prefix_len, sinks, scale,
    stride_q_row, stride_q_head, stride_out_row, stride_out_head,
    stride_page, stride_token, stride_head, stride_table,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr,
    SPLITS: tl.constexpr, PARTS: tl.constexpr, SHARED_PREFIX: tl.constexpr, SINKS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    """Compute decode attention. One program: one row, one KV head, one of SPLITS splits of the row's KV.

    ``order`` lists the rows in the order in which their programs start. The row has one query, which sees the row's
    whole KV. With SHARED_PREFIX, `shared_prefix_kernel` reads the first ``shared_prefix_len`` positions and this kernel
    the rest. PARTS is the number of partial results per row: the splits of both kernels. If there are several, only
    `combine_kernel` adds the sinks.
    """
    # Heads vary fastest, because the KV heads of a page are adjacent in memory.
    head, split = tl.program_id(0), tl.program_id(2)
    if EARLY:
        start_next()
        wait_for_previous()
    row = tl.load(order + tl.program_id(1))
    length = tl.load(seq_lens + row)
    first = tl.maximum(length - WINDOW, 0) if WINDOW >= 0 else 0
    if SHARED_PREFIX:
        first = tl.load(shared_prefix_len)
    # Splits are whole blocks. They are computed from the lengths on the device, so that a CUDA graph fits any lengths.
    share = tl.cdiv(tl.cdiv(length - first, BLOCK_N), SPLITS) * BLOCK_N
    begin = first + split * share
    end = tl.minimum(begin + share, length)
    m = tl.arange(0, BLOCK_M)
    part_index = ((row * tl.num_programs(0) + head) * GROUP + m) * PARTS + split
    if begin < end:
        d = tl.arange(0, BLOCK_D)
        query_head = head * GROUP + m
        real = (m[:, None] < GROUP) & (d[None, :] < HEAD_DIM)
        q_at = q + row.to(tl.int64) * stride_q_row + query_head[:, None] * stride_q_head + d[None, :]
        queries = tl.load(q_at, mask=real, other=0.0)
        position = tl.full([BLOCK_M], 0, tl.int32) + (length - 1)
        row_table = page_table + tl.load(req_pool_indices + row).to(tl.int64) * stride_table
        k_head, v_head = k + head * stride_head, v + head * stride_head
        middle = begin + (end - begin) // BLOCK_N * BLOCK_N
        acc, top, total = attend(
            queries, position, k_head, v_head, row_table, begin, middle, stride_page, stride_token, scale,
            tl.zeros([BLOCK_M, BLOCK_D], tl.float32), tl.full([BLOCK_M], float("-inf"), tl.float32),
            tl.zeros([BLOCK_M], tl.float32), PAGE, HEAD_DIM, WINDOW, SOFT_CAP, False, BLOCK_N,
        )  # fmt: skip
        acc, top, total = attend(
            queries, position, k_head, v_head, row_table, middle, end, stride_page, stride_token, scale,
            acc, top, total, PAGE, HEAD_DIM, WINDOW, SOFT_CAP, True, BLOCK_N,
        )  # fmt: skip
        if SINKS and PARTS == 1:
            total += sink_weight(sinks, query_head, m < GROUP, top)
        acc = acc / total[:, None]
        if PARTS == 1:
            out_at = out + row.to(tl.int64) * stride_out_row + query_head[:, None] * stride_out_head + d[None, :]
            tl.store(out_at, acc.to(out.dtype.element_ty), mask=real)
        else:
            tl.store(partial + part_index[:, None] * HEAD_DIM + d[None, :], acc, mask=real)
            tl.store(partial_top + part_index, top + tl.log2(total), mask=m < GROUP)
    elif PARTS > 1:
        tl.store(partial_top + part_index, tl.full([BLOCK_M], float("-inf"), tl.float32), mask=m < GROUP)


@triton.jit(do_not_specialize_on_alignment=["req_pool_indices", "shared_prefix_len"])
def shared_prefix_kernel(
    q, k, v, partial, partial_top, page_table, req_pool_indices, shared_prefix_len, rows, scale,
    stride_q_row, stride_q_head, stride_page, stride_token, stride_head, stride_table,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE: tl.constexpr, SOFT_CAP: tl.constexpr,
    OWN_SPLITS: tl.constexpr, PREFIX_SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    """Compute decode attention to the shared prefix: the leading positions that all rows have in the same pages.

    Each tile of rows reads the prefix once, instead of each row separately. One program: one KV head, one tile of the
    rows' queries, one of PREFIX_SPLITS splits of the prefix. `decode_kernel` writes the first OWN_SPLITS partial
    results of a row, this kernel the rest. Ye et al., Cascade Inference, 2024; Juravsky et al., Hydragen, 2024.
    """
    head, tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if EARLY:
        start_next()
        wait_for_previous()
    length = tl.load(shared_prefix_len)
    share = tl.cdiv(tl.cdiv(length, BLOCK_N), PREFIX_SPLITS) * BLOCK_N
    begin = split * share
    end = tl.minimum(begin + share, length)
    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    row, query_head = m // GROUP, head * GROUP + m % GROUP
    part_index = (row * tl.num_programs(0) * GROUP + query_head) * (OWN_SPLITS + PREFIX_SPLITS) + OWN_SPLITS + split
    if begin < end:
        d = tl.arange(0, BLOCK_D)
        real = (row[:, None] < rows) & (d[None, :] < HEAD_DIM)
        q_at = q + row.to(tl.int64)[:, None] * stride_q_row + query_head[:, None] * stride_q_head + d[None, :]
        queries = tl.load(q_at, mask=real, other=0.0)
        # All rows have the same prefix pages: read them through the first row of the batch.
        row_table = page_table + tl.load(req_pool_indices).to(tl.int64) * stride_table
        k_head, v_head = k + head * stride_head, v + head * stride_head
        middle = begin + (end - begin) // BLOCK_N * BLOCK_N
        position = tl.full([BLOCK_M], 0, tl.int32) + length
        acc, top, total = attend(
            queries, position, k_head, v_head, row_table, begin, middle, stride_page, stride_token, scale,
            tl.zeros([BLOCK_M, BLOCK_D], tl.float32), tl.full([BLOCK_M], float("-inf"), tl.float32),
            tl.zeros([BLOCK_M], tl.float32), PAGE, HEAD_DIM, -1, SOFT_CAP, False, BLOCK_N,
        )  # fmt: skip
        acc, top, total = attend(
            queries, position, k_head, v_head, row_table, middle, end, stride_page, stride_token, scale,
            acc, top, total, PAGE, HEAD_DIM, -1, SOFT_CAP, True, BLOCK_N,
        )  # fmt: skip
        tl.store(partial + part_index.to(tl.int64)[:, None] * HEAD_DIM + d[None, :], acc / total[:, None], mask=real)
        tl.store(partial_top + part_index, top + tl.log2(total), mask=row < rows)
    else:
        tl.store(partial_top + part_index, tl.full([BLOCK_M], float("-inf"), tl.float32), mask=row < rows)


@triton.jit
def combine_kernel(
    partial, partial_top, out, values, factors, sinks, stride_out_row, stride_out_head, stride_factors,
    HEAD_DIM: tl.constexpr, PARTS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr, QUANTIZE: tl.constexpr,
    SINKS: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    """Combine the partial results of the splits, weighted by their sums of exponentials.

    One program: one row, one query head. ``partial_top`` holds log2 of each part's sum of exponentials. With QUANTIZE
    the result is rounded to out's dtype, and then quantised into ``values`` and ``factors``; out is not written.
    """
    row, head = tl.program_id(0), tl.program_id(1)
    if EARLY:
        start_next()
        wait_for_previous()
    part, d = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_D)
    part_index = (row * tl.num_programs(1) + head) * PARTS + part
    top = tl.load(partial_top + part_index, mask=part < PARTS, other=float("-inf"))
    largest = tl.max(top, 0)
    weights = tl.exp2(top - largest)
    total = tl.sum(weights, 0)
    if SINKS:
        total += sink_weight(sinks, head, True, largest)
    weights = weights / total
    real = (top[:, None] > float("-inf")) & (d[None, :] < HEAD_DIM)  # empty splits wrote no values
    parts = tl.load(partial + part_index.to(tl.int64)[:, None] * HEAD_DIM + d[None, :], mask=real, other=0.0)
    combined = tl.sum(parts * weights[:, None], 0).to(out.dtype.element_ty)
    if QUANTIZE:
        groups = tl.reshape(combined.to(tl.float32), [HEAD_DIM // GROUP_SIZE, GROUP_SIZE])
        first, columns = head * (HEAD_DIM // GROUP_SIZE), tl.num_programs(1) * HEAD_DIM
        store_quantized(
            groups, values, factors, row.to(tl.int64), first, columns, stride_factors, HEAD_DIM // GROUP_SIZE
        )
    else:
        out_at = out + row.to(tl.int64) * stride_out_row + head * stride_out_head + d
        tl.store(out_at, combined, mask=d < HEAD_DIM)


@triton.jit(do_not_specialize_on_alignment=["tiles", "cu_seqlens_q", "seq_lens", "req_pool_indices"])
def extend_kernel(
    q, k, v, out, tiles, cu_seqlens_q, seq_lens, req_pool_indices, page_table, sinks, scale,
    stride_q_token, stride_q_head, stride_out_token, stride_out_head,
    stride_page, stride_token, stride_head, stride_table,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr,
    SINKS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Compute attention for rows with several queries. One program: one KV head, one tile of a row's packed queries.

    ``tiles`` [n, 2] holds (row, number of the tile within the row) of each program.
    """
    head, tile = tl.program_id(0), tl.program_id(1)
    row, tile_m = tl.load(tiles + 2 * tile), tl.load(tiles + 2 * tile + 1) * BLOCK_M
    q_begin, length = tl.load(cu_seqlens_q + row), tl.load(seq_lens + row)
    q_len = tl.load(cu_seqlens_q + row + 1) - q_begin
    m, d = tile_m + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    real = (m[:, None] < q_len * GROUP) & (d[None, :] < HEAD_DIM)
    token, query_head = (q_begin + m // GROUP).to(tl.int64), head * GROUP + m % GROUP
    q_at = q + (token * stride_q_token + query_head * stride_q_head)[:, None] + d[None, :]
    queries = tl.load(q_at, mask=real, other=0.0)

    # The row's queries are its *last* positions, so the causal mask is aligned to the bottom right.
    cached = length - q_len
    position = cached + m // GROUP
    first_query = cached + tile_m // GROUP
    last_query = cached + tl.minimum(tile_m + BLOCK_M - 1, q_len * GROUP - 1) // GROUP
    if WINDOW >= 0:
        begin = tl.maximum(first_query - WINDOW + 1, 0)
        middle = begin
    else:
        begin = 0
        middle = (first_query + 1) // BLOCK_N * BLOCK_N  # every query of the tile sees all blocks before this one
    k_head, v_head = k + head * stride_head, v + head * stride_head
    row_table = page_table + tl.load(req_pool_indices + row).to(tl.int64) * stride_table
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    top, total = tl.full([BLOCK_M], float("-inf"), tl.float32), tl.zeros([BLOCK_M], tl.float32)
    if WINDOW < 0:
        acc, top, total = attend(
            queries, position, k_head, v_head, row_table, begin, middle, stride_page, stride_token, scale,
            acc, top, total, PAGE, HEAD_DIM, WINDOW, SOFT_CAP, False, BLOCK_N,
        )  # fmt: skip
    acc, top, total = attend(
        queries, position, k_head, v_head, row_table, middle, last_query + 1, stride_page, stride_token, scale,
        acc, top, total, PAGE, HEAD_DIM, WINDOW, SOFT_CAP, True, BLOCK_N,
    )  # fmt: skip
    if SINKS:
        total += sink_weight(sinks, query_head, m < q_len * GROUP, top)
    out_at = out + (token * stride_out_token + query_head * stride_out_head)[:, None] + d[None, :]
    tl.store(out_at, (acc / total[:, None]).to(out.dtype.element_ty), mask=real)


# ---- launches ----------------------------------------------------------------------------------------------


class Heads(NamedTuple):
    """The properties of an attention layer that the kernels depend on."""

    q_heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int
    soft_cap: float
    sinks: Tensor | None = None  # [q_heads]: see `minisgl.attention.LayerSpec`

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.q_heads // self.kv_heads


class Pages(NamedTuple):
    """One layer's KV pool and the rows' page tables.

    k and v are [pages, page_size, kv_heads, head_dim] with equal strides.
    """

    k: Tensor
    v: Tensor
    page_table: Tensor  # [request-pool rows, columns] int32
    req_pool_indices: Tensor  # [rows] int32
    seq_lens: Tensor  # [rows] int32


class Tile(NamedTuple):
    """A tile of ``m`` packed queries by ``n`` KV positions, with Triton's num_warps and num_stages."""

    m: int
    n: int
    warps: int
    stages: int


def decode_tile(group: int, head_dim: int, dtype: torch.dtype, splits: int = 1) -> Tile:
    """Return the tile of `decode_kernel`; ``splits`` is the number of splits of each row's KV."""
    m = max(16, triton.next_power_of_2(group))  # tl.dot needs at least 16 rows
    if dtype == torch.float32:  # no tensor cores: small tiles, or registers spill
        return Tile(m, 16, 8, 1)
    # One prefetched block of keys and values per program is enough: several programs run on a multiprocessor.
    if head_dim > 128 or m > 16:
        return Tile(m, 32, 4, 2)
    # With many splits a program has only a block or two: use more warps per program, else more programs.
    return Tile(m, 64, 4, 2) if splits >= 8 else Tile(m, 64, 2, 3)


def shared_prefix_tile(queries: int, head_dim: int, dtype: torch.dtype) -> Tile:
    """Return the tile of `shared_prefix_kernel`; ``queries`` counts the packed queries (rows · group) of all rows."""
    return extend_tile(queries, head_dim, dtype)


def extend_tile(longest: int, head_dim: int, dtype: torch.dtype) -> Tile:
    """Return the tile of `extend_kernel`; ``longest`` is the packed queries (tokens · group) of the longest row."""
    m = min(128, max(16, triton.next_power_of_2(longest)))
    if dtype == torch.float32:  # no tensor cores: small tiles, or registers spill
        return Tile(min(m, 32), 16, 8, 1)
    if head_dim > 128:
        return Tile(min(m, 64), 32, 4, 2)
    return Tile(m, 64, 8 if m == 128 else 4, 3)


def decode_splits(rows: int, kv_heads: int, programs: int) -> int:
    """Return the number of splits of each row's KV, a power of two, so that about ``programs`` programs are launched.

    The result is at least 2 unless the rows alone give clearly more than ``programs`` programs: rows differ in length,
    and without splits the last programs would run on a few multiprocessors only.
    """
    splits = max(1, min(64, programs // (rows * kv_heads)))
    return max(1 << (splits.bit_length() - 1), 2 if 4 * rows * kv_heads <= 5 * programs else 1)


def shared_prefix_splits(rows: int, heads: Heads, dtype: torch.dtype, programs: int) -> int:
    """Return the number of splits of a prefix that ``rows`` rows share.

    A program of `shared_prefix_kernel` has many queries, so half of ``programs`` programs are launched. Each split adds
    a partial result to every row, so there are at most 8 splits.
    """
    tile = shared_prefix_tile(rows * heads.group, heads.head_dim, dtype)
    return min(8, decode_splits(triton.cdiv(rows * heads.group, tile.m), heads.kv_heads, programs // 2))


def decode(
    q: Tensor, out: Tensor | QuantizedRows, pages: Pages, order: Tensor, heads: Heads, splits: int,
    partial: Tensor | None, tile: Tile, shared_prefix_len: Tensor | None = None, prefix_splits: int = 0,
) -> None:  # fmt: skip
    """Launch decode attention: one query per row; q and out are [rows, q_heads, head_dim].

    If `quantizes`, ``out`` may be `QuantizedRows` of q_heads · head_dim columns.

    ``order`` [rows] int32 lists each row once. If long rows come first, no long row starts last and runs alone.
    ``partial`` is float32 scratch memory of at least rows · q_heads · (splits + prefix_splits) · (head_dim + 1)
    elements, or None if splits + prefix_splits is 1. ``shared_prefix_len`` int32 [1] is the number of leading positions
    that all rows have in the same pages; this prefix is read in ``prefix_splits`` splits. None: no shared prefix.
    """
    rows, parts = q.shape[0], splits + prefix_splits
    quantized, out = (out, q) if isinstance(out, QuantizedRows) else (None, out)  # q: only its dtype is used
    assert quantized is None or quantizes(heads, parts)
    scratch = out if partial is None else partial
    tops = scratch if partial is None else partial[rows * heads.q_heads * parts * heads.head_dim :]
    block_d, early = _block_d(heads), starts_early(q)
    if shared_prefix_len is not None:
        wide = shared_prefix_tile(rows * heads.group, heads.head_dim, q.dtype)
        shared_prefix_kernel[(heads.kv_heads, triton.cdiv(rows * heads.group, wide.m), prefix_splits)](
            q, pages.k, pages.v, scratch, tops, pages.page_table, pages.req_pool_indices,
            shared_prefix_len, rows, score_scale(heads),
            *q.stride()[:2], *pages.k.stride()[:3], pages.page_table.stride(0),
            GROUP=heads.group, HEAD_DIM=heads.head_dim, PAGE=pages.k.shape[1], SOFT_CAP=heads.soft_cap,
            OWN_SPLITS=splits, PREFIX_SPLITS=prefix_splits, BLOCK_M=wide.m, BLOCK_N=wide.n, BLOCK_D=block_d,
            num_warps=wide.warps, num_stages=wide.stages, **early,
        )  # fmt: skip
    decode_kernel[(heads.kv_heads, rows, splits)](
        q, pages.k, pages.v, out, scratch, tops, pages.page_table, pages.req_pool_indices, pages.seq_lens, order,
        pages.seq_lens if shared_prefix_len is None else shared_prefix_len, heads.sinks, score_scale(heads),
        *q.stride()[:2], *out.stride()[:2], *pages.k.stride()[:3], pages.page_table.stride(0),
        GROUP=heads.group, HEAD_DIM=heads.head_dim, PAGE=pages.k.shape[1], WINDOW=heads.window,
        SOFT_CAP=heads.soft_cap, SPLITS=splits, PARTS=parts, SHARED_PREFIX=shared_prefix_len is not None,
        SINKS=heads.sinks is not None,
        BLOCK_M=tile.m, BLOCK_N=tile.n, BLOCK_D=block_d, num_warps=tile.warps, num_stages=tile.stages, **early,
    )  # fmt: skip
    if parts > 1:
        combine_kernel[(rows, heads.q_heads)](
            scratch, tops, out, *((None, None) if quantized is None else (quantized.values, quantized.factors)),
            heads.sinks, *out.stride()[:2], 0 if quantized is None else quantized.factors.stride(1),
            HEAD_DIM=heads.head_dim, PARTS=parts, BLOCK_P=triton.next_power_of_2(parts), BLOCK_D=block_d,
            QUANTIZE=quantized is not None, SINKS=heads.sinks is not None, num_warps=4, **early,
        )  # fmt: skip


def quantizes(heads: Heads, parts: int) -> bool:
    """Return whether `decode` can quantise its result: ``parts`` parts are merged, and heads have groups of 128."""
    return parts > 1 and heads.head_dim in (GROUP_SIZE.value, 2 * GROUP_SIZE.value)


def extend(q: Tensor, out: Tensor, pages: Pages, heads: Heads, cu_seqlens_q: Tensor, tiles: Tensor, tile: Tile) -> None:
    """Launch attention for rows with several queries; q and out are [tokens, q_heads, head_dim].

    Row r has the tokens cu_seqlens_q[r] up to cu_seqlens_q[r + 1]. ``tiles`` [n, 2] int32 lists (row, number of the
    tile within the row), ⌈tokens · group / tile.m⌉ tiles for each row; tiles with the most work come first.
    """
    extend_kernel[(heads.kv_heads, len(tiles))](
        q, pages.k, pages.v, out, tiles, cu_seqlens_q, pages.seq_lens, pages.req_pool_indices, pages.page_table,
        heads.sinks, score_scale(heads),
        *q.stride()[:2], *out.stride()[:2], *pages.k.stride()[:3], pages.page_table.stride(0),
        GROUP=heads.group, HEAD_DIM=heads.head_dim, PAGE=pages.k.shape[1], WINDOW=heads.window,
        SOFT_CAP=heads.soft_cap, SINKS=heads.sinks is not None, BLOCK_M=tile.m, BLOCK_N=tile.n,
        BLOCK_D=_block_d(heads), num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def score_scale(heads: Heads) -> float:
    """Return the factor by which `attend` multiplies q·k: divided by the soft cap, or converted to base 2."""
    return heads.scale / heads.soft_cap if heads.soft_cap > 0 else heads.scale * LOG2_E.value


def _block_d(heads: Heads) -> int:
    size: int = triton.next_power_of_2(heads.head_dim)
    return max(16, size)
