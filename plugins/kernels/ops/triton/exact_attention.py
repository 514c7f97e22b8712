"""Paged attention in Triton whose results do not depend on chunks or on other rows: ``exact=true`` on a GPU.

The KV of a row is cut into splits of `SPLIT` positions, at multiples of `SPLIT`. A split is computed with one online
softmax, block by block from its first position; then the results of the splits are merged in order. One program
computes all splits of its queries, or one split each, and then another launch merges them. Both do the same additions,
with tiles of one shape for rows of one query and of many. Keys that a query does not see have weight 0 and change no
bit, so a tile may hold queries of several positions.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl.plugins.kernels.ops.triton.attention import Heads, Pages, Tile, attend, score_scale
from minisgl.plugins.kernels.ops.triton.device import device_function
from minisgl.plugins.kernels.ops.triton.early import start_next, starts_early, wait_for_previous

__all__ = ["SPLIT", "attention", "tile_of"]

SPLIT = 256
"""KV positions of a split."""
WAYS = 16
"""The most programs that share the splits of a row's KV."""


@device_function
def merge(acc, top, total, other_acc, other_top, other_total):
    """Merge the states of two online softmaxes: see `attend` for their meaning. An empty one changes no bit."""
    new_top = tl.maximum(top, other_top)
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    own, other = tl.exp2(top - base), tl.exp2(other_top - base)
    return acc * own[:, None] + other_acc * other[:, None], new_top, total * own + other_total * other


@triton.jit(do_not_specialize_on_alignment=["tiles", "cu_seqlens_q", "seq_lens", "req_pool_indices"])
def attention_kernel(
    q, k, v, out, partial, partial_state, tiles, cu_seqlens_q, seq_lens, req_pool_indices, page_table, scale,
    stride_q_token, stride_q_head, stride_out_token, stride_out_head,
    stride_page, stride_token, stride_head, stride_table,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr,
    DECODE: tl.constexpr, SPLITS: tl.constexpr, WAYS: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    """Compute one KV head for one tile of a row's packed queries; with SPLITS, every WAYS-th split of its KV only.

    ``tiles`` [n, 2] holds (row, number of the tile within the row) of each program. With DECODE each row has one query,
    and ``tiles`` [n] holds the rows. With SPLITS, the states of the splits are written to ``partial`` [rows, q_heads,
    SPLITS, HEAD_DIM] and ``partial_state`` [rows, q_heads, SPLITS, 2], which `merge_kernel` reads.
    """
    head, tile = tl.program_id(0), tl.program_id(1)
    if EARLY:
        start_next()
        wait_for_previous()
    if DECODE:
        row, tile_m = tl.load(tiles + tile), 0
        q_begin, q_len = row, 1
    else:
        row, tile_m = tl.load(tiles + 2 * tile), tl.load(tiles + 2 * tile + 1) * BLOCK_M
        q_begin = tl.load(cu_seqlens_q + row)
        q_len = tl.load(cu_seqlens_q + row + 1) - q_begin
    length = tl.load(seq_lens + row)
    m, d = tile_m + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    real = (m[:, None] < q_len * GROUP) & (d[None, :] < HEAD_DIM)
    token, query_head = (q_begin + m // GROUP).to(tl.int64), head * GROUP + m % GROUP
    q_at = q + (token * stride_q_token + query_head * stride_q_head)[:, None] + d[None, :]
    queries = tl.load(q_at, mask=real, other=0.0)

    cached = length - q_len
    position = cached + m // GROUP
    first_query = cached + tile_m // GROUP
    end = cached + tl.minimum(tile_m + BLOCK_M - 1, q_len * GROUP - 1) // GROUP + 1
    if WINDOW >= 0:
        begin = tl.maximum(first_query - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
        middle = begin
    else:
        begin = 0
        middle = (first_query + 1) // BLOCK_N * BLOCK_N  # every query of the tile sees all blocks before this one
    k_head, v_head = k + head * stride_head, v + head * stride_head
    row_table = page_table + tl.load(req_pool_indices + row).to(tl.int64) * stride_table
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    top, total = tl.full([BLOCK_M], float("-inf"), tl.float32), tl.zeros([BLOCK_M], tl.float32)
    first_split, last_split = begin // SPLIT, tl.cdiv(end, SPLIT)
    if SPLITS > 0:
        first_split += tl.program_id(2)
    for split in range(first_split, last_split, WAYS):
        low, high = tl.maximum(split * SPLIT, begin), tl.minimum(split * SPLIT + SPLIT, end)
        border = tl.minimum(tl.maximum(middle, low), high)
        part = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        part_top, part_total = tl.full([BLOCK_M], float("-inf"), tl.float32), tl.zeros([BLOCK_M], tl.float32)
        if WINDOW < 0:
            part, part_top, part_total = attend(
                queries, position, k_head, v_head, row_table, low, border, stride_page, stride_token, scale,
                part, part_top, part_total, PAGE, HEAD_DIM, WINDOW, SOFT_CAP, False, BLOCK_N,
            )  # fmt: skip
        part, part_top, part_total = attend(
            queries, position, k_head, v_head, row_table, border, high, stride_page, stride_token, scale,
            part, part_top, part_total, PAGE, HEAD_DIM, WINDOW, SOFT_CAP, True, BLOCK_N,
        )  # fmt: skip
        if SPLITS > 0:
            index = (token * (tl.num_programs(0) * GROUP) + query_head) * SPLITS + split
            tl.store(partial + index[:, None] * HEAD_DIM + d[None, :], part, mask=real)
            tl.store(partial_state + 2 * index, part_top, mask=m < q_len * GROUP)
            tl.store(partial_state + 2 * index + 1, part_total, mask=m < q_len * GROUP)
        else:
            acc, top, total = merge(acc, top, total, part, part_top, part_total)
    if SPLITS == 0:
        out_at = out + (token * stride_out_token + query_head * stride_out_head)[:, None] + d[None, :]
        tl.store(out_at, (acc / total[:, None]).to(out.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize_on_alignment=["seq_lens"])
def merge_kernel(
    partial, partial_state, out, seq_lens, stride_out_row, stride_out_head,
    HEAD_DIM: tl.constexpr, WINDOW: tl.constexpr, SPLITS: tl.constexpr, SPLIT: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    """Merge the splits of one row with one query, in order. One program: one row, one query head."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if EARLY:
        start_next()
        wait_for_previous()
    length = tl.load(seq_lens + row)
    begin = tl.maximum(length - WINDOW, 0) // BLOCK_N * BLOCK_N if WINDOW >= 0 else 0
    one, d = tl.arange(0, 1), tl.arange(0, BLOCK_D)
    acc = tl.zeros([1, BLOCK_D], tl.float32)
    top, total = tl.full([1], float("-inf"), tl.float32), tl.zeros([1], tl.float32)
    for split in range(begin // SPLIT, tl.cdiv(length, SPLIT)):
        index = (row * tl.num_programs(1) + head) * SPLITS + split + one
        part = tl.load(partial + index[:, None] * HEAD_DIM + d[None, :], mask=d[None, :] < HEAD_DIM, other=0.0)
        state = partial_state + 2 * index
        acc, top, total = merge(acc, top, total, part, tl.load(state), tl.load(state + 1))
    out_at = out + row * stride_out_row + head * stride_out_head + d[None, :]
    tl.store(out_at, (acc / total[:, None]).to(out.dtype.element_ty), mask=d[None, :] < HEAD_DIM)


def tile_of(heads: Heads, dtype: torch.dtype) -> Tile:
    """Return the tile: of 64 packed queries, as many as tensor cores of Hopper multiply at once."""
    if dtype == torch.float32:  # no tensor cores: small tiles, or registers spill
        return Tile(max(16, triton.next_power_of_2(heads.group)), 16, 8, 1)
    if heads.head_dim > 128:
        return Tile(64, 32, 4, 2)
    return Tile(64, 64, 4, 2)


def attention(
    q: Tensor, out: Tensor, pages: Pages, heads: Heads, tiles: Tensor, cu_seqlens_q: Tensor | None, programs: int
) -> None:
    """Launch attention; q and out are [tokens, q_heads, head_dim].

    Row r has the tokens cu_seqlens_q[r] up to cu_seqlens_q[r + 1], and ``tiles`` [n, 2] int32 lists (row, number of the
    tile within the row), ⌈tokens · group / tile.m⌉ tiles for each row. ``cu_seqlens_q`` None: each row has one token,
    and ``tiles`` [rows] int32 lists each row once. Then the splits of a row are computed by several programs if there
    are fewer than ``programs`` otherwise, which changes no bit.
    """
    decode, tile = cu_seqlens_q is None, tile_of(heads, q.dtype)
    most = triton.cdiv(pages.page_table.shape[1] * pages.k.shape[1], SPLIT)
    splits = most if decode and most > 1 and len(tiles) * heads.kv_heads < programs else 0
    ways = min(splits, WAYS) if splits else 1
    partial = torch.empty((len(q) * heads.q_heads * splits, heads.head_dim), dtype=torch.float32, device=q.device)
    state = torch.empty((len(q) * heads.q_heads * splits, 2), dtype=torch.float32, device=q.device)
    block_d, early = max(16, triton.next_power_of_2(heads.head_dim)), starts_early(q)
    attention_kernel[(heads.kv_heads, len(tiles), ways)](
        q, pages.k, pages.v, out, partial if splits else out, state if splits else out, tiles,
        tiles if cu_seqlens_q is None else cu_seqlens_q, pages.seq_lens, pages.req_pool_indices, pages.page_table,
        score_scale(heads),
        *q.stride()[:2], *out.stride()[:2], *pages.k.stride()[:3], pages.page_table.stride(0),
        GROUP=heads.group, HEAD_DIM=heads.head_dim, PAGE=pages.k.shape[1], WINDOW=heads.window,
        SOFT_CAP=heads.soft_cap, DECODE=decode, SPLITS=splits, WAYS=ways, SPLIT=SPLIT,
        BLOCK_M=tile.m, BLOCK_N=tile.n, BLOCK_D=block_d, num_warps=tile.warps, num_stages=tile.stages,
        enable_fp_fusion=False, **early,
    )  # fmt: skip
    if splits:
        merge_kernel[(len(tiles), heads.q_heads)](
            partial, state, out, pages.seq_lens, *out.stride()[:2],
            HEAD_DIM=heads.head_dim, WINDOW=heads.window, SPLITS=splits, SPLIT=SPLIT, BLOCK_N=tile.n, BLOCK_D=block_d,
            num_warps=1, enable_fp_fusion=False, **early,
        )  # fmt: skip
