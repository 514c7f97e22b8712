"""Attention over pages in Triton: decode with split KV, and extend (whole prompts, chunks, cached prefixes).

Dao, FlashAttention-2, 2023 (extend); Dao et al., Flash-Decoding for long-context inference, 2023 (decode). The query
heads that share a KV head stand in one tile, so that keys and values are read once for all of them: row m of a tile is
query ``m // GROUP``, head ``m % GROUP``. Knows tensors only; who owns a page, and what a step is, others know.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernel.triton.early import start_next, starts_early, wait_for_previous

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def attend(
    q, position, k, v, table, begin, end, stride_page, stride_token, scale, acc, top, total,
    PAGE: tl.constexpr, HEAD_DIM: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr,
    MASKED: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Read the KV positions [begin, end) block by block, and carry a softmax along that needs no second pass.

    q [M, D], position [M] of each row's query; k, v: one KV head's; table: one row of the page table. acc [M, D] is the
    sum of values weighted by 2^(score - top), total [M] the sum of those weights, top [M] the largest score so far;
    scores are in powers of two. Without MASKED, every query sees every position from begin to end, a whole number
    of blocks.
    """
    d = tl.arange(0, q.shape[1])
    for start in range(begin, end, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        inside = n < end
        if MASKED:
            page = tl.load(table + n // PAGE, mask=inside, other=0)
        else:
            page = tl.load(table + n // PAGE)
        place = page.to(tl.int64) * stride_page + (n % PAGE) * stride_token
        k_at, v_at = k + place[None, :] + d[:, None], v + place[:, None] + d[None, :]
        if MASKED or q.shape[1] > HEAD_DIM:
            # What lies behind the end of a page's tokens may be anything: read as 0, for 0·NaN is NaN.
            keys = tl.load(k_at, mask=inside[None, :] & (d[:, None] < HEAD_DIM), other=0.0)
        else:
            keys = tl.load(k_at)
        scores = tl.dot(q, keys.to(q.dtype), input_precision="ieee") * scale
        if SOFT_CAP > 0.0:  # cap·tanh(score / cap), whose scale holds 1 / cap already
            scores = SOFT_CAP * LOG2_E * (1.0 - 2.0 / (1.0 + tl.exp(2.0 * scores)))
        if MASKED:
            seen = inside[None, :] & (n[None, :] <= position[:, None])
            if WINDOW >= 0:
                seen = seen & (n[None, :] > position[:, None] - WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        # A row that has seen nothing yet keeps -inf, and -inf - -inf would be NaN.
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(scores - base[:, None])
        fade = tl.exp2(top - base)
        if MASKED or q.shape[1] > HEAD_DIM:
            values = tl.load(v_at, mask=inside[:, None] & (d[None, :] < HEAD_DIM), other=0.0)
        else:
            values = tl.load(v_at)
        acc = tl.dot(weights.to(q.dtype), values.to(q.dtype), acc * fade[:, None], input_precision="ieee")
        total = total * fade + tl.sum(weights, 1)
        top = new_top
    return acc, top, total


@triton.jit(do_not_specialize_on_alignment=["slots", "seq_lens"])
def decode_kernel(
    q, k, v, out, partial, partial_top, table, slots, seq_lens, shared, scale,
    stride_q_row, stride_q_head, stride_out_row, stride_out_head,
    stride_page, stride_token, stride_head, stride_table,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr,
    SPLITS: tl.constexpr, PARTS: tl.constexpr, SHARED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    """One program: one row, one KV head, one of SPLITS shares of the row's KV. Its one query sees all of it.

    With SHARED, the first ``shared`` positions are left to `shared_kernel`. PARTS: all shares of a row, those too.
    """
    head, row, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)  # heads of a page lie together: so read
    if EARLY:
        start_next()
        wait_for_previous()
    length = tl.load(seq_lens + row)
    first = tl.maximum(length - WINDOW, 0) if WINDOW >= 0 else 0
    if SHARED:
        first = tl.load(shared)
    # In whole blocks, from the lengths on the device: a recorded launch serves whatever lengths come.
    share = tl.cdiv(tl.cdiv(length - first, BLOCK_N), SPLITS) * BLOCK_N
    begin = first + split * share
    end = tl.minimum(begin + share, length)
    m = tl.arange(0, BLOCK_M)
    place = ((row * tl.num_programs(0) + head) * GROUP + m) * PARTS + split
    if begin < end:
        d = tl.arange(0, BLOCK_D)
        query_head = head * GROUP + m
        real = (m[:, None] < GROUP) & (d[None, :] < HEAD_DIM)
        q_at = q + row.to(tl.int64) * stride_q_row + query_head[:, None] * stride_q_head + d[None, :]
        queries = tl.load(q_at, mask=real, other=0.0)
        position = tl.full([BLOCK_M], 0, tl.int32) + (length - 1)
        row_table = table + tl.load(slots + row).to(tl.int64) * stride_table
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
        acc = acc / total[:, None]
        if PARTS == 1:
            out_at = out + row.to(tl.int64) * stride_out_row + query_head[:, None] * stride_out_head + d[None, :]
            tl.store(out_at, acc.to(out.dtype.element_ty), mask=real)
        else:
            tl.store(partial + place[:, None] * HEAD_DIM + d[None, :], acc, mask=real)
            tl.store(partial_top + place, top + tl.log2(total), mask=m < GROUP)
    elif PARTS > 1:
        tl.store(partial_top + place, tl.full([BLOCK_M], float("-inf"), tl.float32), mask=m < GROUP)


@triton.jit(do_not_specialize_on_alignment=["slots", "shared"])
def shared_kernel(
    q, k, v, partial, partial_top, table, slots, shared, rows, scale,
    stride_q_row, stride_q_head, stride_page, stride_token, stride_head, stride_table,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE: tl.constexpr, SOFT_CAP: tl.constexpr,
    OTHERS: tl.constexpr, SHARES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    """The positions that all rows have in the same pages, read once for a tile of rows instead of once for each.

    One program: one KV head, one tile of the rows' queries, one of SHARES shares; a row's first OTHERS parts are
    `decode_kernel`'s. Ye et al., Cascade Inference, 2024; Juravsky et al., Hydragen, 2024.
    """
    head, tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if EARLY:
        start_next()
        wait_for_previous()
    length = tl.load(shared)
    share = tl.cdiv(tl.cdiv(length, BLOCK_N), SHARES) * BLOCK_N
    begin = split * share
    end = tl.minimum(begin + share, length)
    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    row, query_head = m // GROUP, head * GROUP + m % GROUP
    place = (row * tl.num_programs(0) * GROUP + query_head) * (OTHERS + SHARES) + OTHERS + split
    if begin < end:
        d = tl.arange(0, BLOCK_D)
        real = (row[:, None] < rows) & (d[None, :] < HEAD_DIM)
        q_at = q + row.to(tl.int64)[:, None] * stride_q_row + query_head[:, None] * stride_q_head + d[None, :]
        queries = tl.load(q_at, mask=real, other=0.0)
        row_table = table + tl.load(slots).to(tl.int64) * stride_table  # the first row's pages are everyone's
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
        tl.store(partial + place.to(tl.int64)[:, None] * HEAD_DIM + d[None, :], acc / total[:, None], mask=real)
        tl.store(partial_top + place, top + tl.log2(total), mask=row < rows)
    else:
        tl.store(partial_top + place, tl.full([BLOCK_M], float("-inf"), tl.float32), mask=row < rows)


@triton.jit
def combine_kernel(
    partial, partial_top, out, stride_out_row, stride_out_head,
    HEAD_DIM: tl.constexpr, PARTS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr,
    EARLY: tl.constexpr = False,
):  # fmt: skip
    """One program: one row, one query head. Adds up the parts, each by the weight that its sum of exponents gives."""
    row, head = tl.program_id(0), tl.program_id(1)
    if EARLY:
        start_next()
        wait_for_previous()
    part, d = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_D)
    place = (row * tl.num_programs(1) + head) * PARTS + part
    top = tl.load(partial_top + place, mask=part < PARTS, other=float("-inf"))
    weights = tl.exp2(top - tl.max(top, 0))
    weights = weights / tl.sum(weights, 0)
    real = (top[:, None] > float("-inf")) & (d[None, :] < HEAD_DIM)  # the others wrote nothing
    parts = tl.load(partial + place.to(tl.int64)[:, None] * HEAD_DIM + d[None, :], mask=real, other=0.0)
    out_at = out + row.to(tl.int64) * stride_out_row + head * stride_out_head + d
    tl.store(out_at, tl.sum(parts * weights[:, None], 0).to(out.dtype.element_ty), mask=d < HEAD_DIM)


@triton.jit(do_not_specialize_on_alignment=["tiles", "cu_seqlens_q", "seq_lens", "slots"])
def extend_kernel(
    q, k, v, out, tiles, cu_seqlens_q, seq_lens, slots, table, scale,
    stride_q_token, stride_q_head, stride_out_token, stride_out_head,
    stride_page, stride_token, stride_head, stride_table,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program: one KV head, and one tile of a row's queries: ``tiles`` [n, 2] has row and tile number."""
    head, tile = tl.program_id(0), tl.program_id(1)
    row, tile_m = tl.load(tiles + 2 * tile), tl.load(tiles + 2 * tile + 1) * BLOCK_M
    q_begin, length = tl.load(cu_seqlens_q + row), tl.load(seq_lens + row)
    q_len = tl.load(cu_seqlens_q + row + 1) - q_begin
    m, d = tile_m + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    real = (m[:, None] < q_len * GROUP) & (d[None, :] < HEAD_DIM)
    token, query_head = (q_begin + m // GROUP).to(tl.int64), head * GROUP + m % GROUP
    q_at = q + (token * stride_q_token + query_head * stride_q_head)[:, None] + d[None, :]
    queries = tl.load(q_at, mask=real, other=0.0)

    # The row's queries are its *last* positions: the causal mask hangs at the bottom right.
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
    row_table = table + tl.load(slots + row).to(tl.int64) * stride_table
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
    out_at = out + (token * stride_out_token + query_head * stride_out_head)[:, None] + d[None, :]
    tl.store(out_at, (acc / total[:, None]).to(out.dtype.element_ty), mask=real)


# ---- launching them -----------------------------------------------------------------------------------


class Heads(NamedTuple):
    """What the layers of a model differ in, at most."""

    q_heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int
    soft_cap: float

    @property
    def group(self) -> int:
        return self.q_heads // self.kv_heads


class Pages(NamedTuple):
    """One layer's keys and values [pages, page, kv_heads, head_dim] of the same strides, and where a row's are."""

    k: Tensor
    v: Tensor
    table: Tensor  # [slots, columns] int32
    slots: Tensor  # [rows] int32
    seq_lens: Tensor  # [rows] int32


class Tile(NamedTuple):
    """A launch's shape: ``m`` packed queries by ``n`` positions, and what Triton is told about a program."""

    m: int
    n: int
    warps: int
    stages: int


def decode_tile(group: int, head_dim: int, dtype: torch.dtype, splits: int = 1) -> Tile:
    m = max(16, triton.next_power_of_2(group))  # tl.dot's least
    if dtype == torch.float32:  # no tensor cores: small tiles, or registers spill
        return Tile(m, 16, 8, 1)
    # One block of keys and values in flight for each program is enough: several programs share a multiprocessor.
    if head_dim > 128 or m > 16:
        return Tile(m, 32, 4, 2)
    # Short shares are over after a block or two: then more warps that share its work, else more programs.
    return Tile(m, 64, 4, 2) if splits >= 8 else Tile(m, 64, 2, 3)


def shared_tile(queries: int, head_dim: int, dtype: torch.dtype) -> Tile:
    """``queries``: packed ones of all rows, which stand in tiles as a long prompt's do."""
    return extend_tile(queries, head_dim, dtype)


def extend_tile(longest: int, head_dim: int, dtype: torch.dtype) -> Tile:
    """``longest``: packed queries (tokens · group) of the longest row."""
    m = min(128, max(16, triton.next_power_of_2(longest)))
    if dtype == torch.float32:  # no tensor cores: small tiles, or registers spill
        return Tile(min(m, 32), 16, 8, 1)
    if head_dim > 128:
        return Tile(min(m, 64), 32, 4, 2)
    return Tile(m, 64, 8 if m == 128 else 4, 3)


def decode_splits(rows: int, kv_heads: int, programs: int) -> int:
    """Into how many shares each row's KV is cut so that about ``programs`` programs are launched: a power of two.

    At least two until there are twice as many anyway: rows are of unequal length, and the last ones would run alone.
    """
    wanted = max(1, min(64, programs // (rows * kv_heads)))
    return max(1 << (wanted.bit_length() - 1), 2 if rows * kv_heads <= 2 * programs else 1)


def shared_splits(rows: int, heads: Heads, dtype: torch.dtype, programs: int) -> int:
    """Into how many shares a prefix that ``rows`` rows have in common is cut. A program has many queries, so there are
    half as many programs; and each share is a part of every row to be added up, so there are 8 at most."""
    tile = shared_tile(rows * heads.group, heads.head_dim, dtype)
    return min(8, decode_splits(triton.cdiv(rows * heads.group, tile.m), heads.kv_heads, programs // 2))


def decode(
    q: Tensor, out: Tensor, pages: Pages, heads: Heads, splits: int, partial: Tensor | None, tile: Tile,
    shared: Tensor | None = None, shares: int = 0,
) -> None:  # fmt: skip
    """q, out [rows, q_heads, head_dim], one query a row. ``partial``: float32 scratch of at least
    rows · q_heads · (splits + shares) · (head_dim + 1) elements; None where there is one part.

    ``shared`` int32 [1]: how many leading positions all rows have in the same pages; they are read in ``shares``.
    """
    rows, parts = q.shape[0], splits + shares
    scratch = out if partial is None else partial
    tops = scratch if partial is None else partial[rows * heads.q_heads * parts * heads.head_dim :]
    block_d, early = _block_d(heads), starts_early(q)
    if shared is not None:
        wide = shared_tile(rows * heads.group, heads.head_dim, q.dtype)
        shared_kernel[(heads.kv_heads, triton.cdiv(rows * heads.group, wide.m), shares)](
            q, pages.k, pages.v, scratch, tops, pages.table, pages.slots, shared, rows, _scale(heads),
            *q.stride()[:2], *pages.k.stride()[:3], pages.table.stride(0),
            GROUP=heads.group, HEAD_DIM=heads.head_dim, PAGE=pages.k.shape[1], SOFT_CAP=heads.soft_cap,
            OTHERS=splits, SHARES=shares, BLOCK_M=wide.m, BLOCK_N=wide.n, BLOCK_D=block_d,
            num_warps=wide.warps, num_stages=wide.stages, **early,
        )  # fmt: skip
    decode_kernel[(heads.kv_heads, rows, splits)](
        q, pages.k, pages.v, out, scratch, tops, pages.table, pages.slots, pages.seq_lens,
        pages.seq_lens if shared is None else shared, _scale(heads),
        *q.stride()[:2], *out.stride()[:2], *pages.k.stride()[:3], pages.table.stride(0),
        GROUP=heads.group, HEAD_DIM=heads.head_dim, PAGE=pages.k.shape[1], WINDOW=heads.window,
        SOFT_CAP=heads.soft_cap, SPLITS=splits, PARTS=parts, SHARED=shared is not None,
        BLOCK_M=tile.m, BLOCK_N=tile.n, BLOCK_D=block_d, num_warps=tile.warps, num_stages=tile.stages, **early,
    )  # fmt: skip
    if parts > 1:
        combine_kernel[(rows, heads.q_heads)](
            scratch, tops, out, *out.stride()[:2], HEAD_DIM=heads.head_dim, PARTS=parts,
            BLOCK_P=triton.next_power_of_2(parts), BLOCK_D=block_d, num_warps=4, **early,
        )  # fmt: skip


def extend(q: Tensor, out: Tensor, pages: Pages, heads: Heads, cu_seqlens_q: Tensor, tiles: Tensor, tile: Tile) -> None:
    """q, out [tokens, q_heads, head_dim]; row r has tokens cu_seqlens_q[r] to cu_seqlens_q[r + 1]. ``tiles`` [n, 2]
    int32
    lists (row, number of the tile in the row), the longest work first; a row has ⌈tokens · group / tile.m⌉."""
    extend_kernel[(heads.kv_heads, len(tiles))](
        q, pages.k, pages.v, out, tiles, cu_seqlens_q, pages.seq_lens, pages.slots, pages.table, _scale(heads),
        *q.stride()[:2], *out.stride()[:2], *pages.k.stride()[:3], pages.table.stride(0),
        GROUP=heads.group, HEAD_DIM=heads.head_dim, PAGE=pages.k.shape[1], WINDOW=heads.window,
        SOFT_CAP=heads.soft_cap, BLOCK_M=tile.m, BLOCK_N=tile.n, BLOCK_D=_block_d(heads),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def _scale(heads: Heads) -> float:
    return heads.scale / heads.soft_cap if heads.soft_cap > 0 else heads.scale * LOG2_E.value


def _block_d(heads: Heads) -> int:
    return max(16, triton.next_power_of_2(heads.head_dim))
