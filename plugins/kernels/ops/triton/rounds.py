"""The work between verification rounds as one launch. The torch reference is `minisgl.plugins.kernels.ops.rounds`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl.plugins.kernels.ops.triton.early import start_next, starts_early, wait_for_previous

BLOCK = 2048
"""Positions of a row's history that are compared at once."""
LANES = 32
"""Tokens of a row for which a program is compiled at least, so that it is compiled once for most numbers of drafts."""


@triton.jit(do_not_specialize=["width"])
def advance_kernel(
    tokens, packed, history, page_table, accepted, stride_tokens, stride_packed, stride_history, stride_table,
    page_size, last_position, last_column, width,
    LANES: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    """One program: one row. See `minisgl.plugins.kernels.ops.rounds.advance`."""
    row = tl.program_id(0)
    if EARLY:
        start_next()
        wait_for_previous()
    lane = tl.arange(0, LANES)
    inside = lane < width
    at = packed + row * width + lane
    sampled = tl.load(tokens + row * stride_tokens + lane, mask=inside, other=-1).to(tl.int32)
    drafts = tl.load(at + 1, mask=lane < width - 1, other=-1)  # the draft after each token
    base = tl.load(packed + stride_packed + row * width)
    req = tl.load(packed + 3 * stride_packed + row * width).to(tl.int64)
    wrong = tl.where((sampled != drafts) | (lane >= width - 1), lane, LANES)
    length = tl.min(wrong, 0) + 1
    tl.store(accepted + row, length)
    own = history + req * stride_history
    tl.store(own + tl.minimum(base + 1 + lane, last_position), sampled, mask=inside)
    tl.debug_barrier()  # the stores above are read below, by other threads
    first = base + length
    end = first + 1  # number of tokens of the row
    last = tl.load(own + first)
    last2, last3 = tl.load(own + tl.maximum(first - 1, 0)), tl.load(own + tl.maximum(first - 2, 0))
    last4 = tl.load(own + tl.maximum(first - 3, 0))
    found4, found2 = tl.full([BLOCK], 0, tl.int32), tl.full([BLOCK], 0, tl.int32)
    i = tl.arange(0, BLOCK)
    for start in range(0, first, BLOCK):
        end_of_group = start + i  # the last token of an earlier group
        known = end_of_group < first
        pair = known & (end_of_group >= 1) & (tl.load(own + end_of_group, mask=known, other=-1) == last)
        pair &= tl.load(own + end_of_group - 1, mask=pair, other=-1) == last2
        found2 = tl.where(pair, end_of_group + 1, found2)
        four = pair & (end_of_group >= 3)
        four &= tl.load(own + end_of_group - 2, mask=four, other=-1) == last3
        four &= tl.load(own + end_of_group - 3, mask=four, other=-1) == last4
        found4 = tl.where(four, end_of_group + 1, found4)
    best4, best2 = tl.max(found4, 0), tl.max(found2, 0)
    after = tl.where(best4 > 0, best4, tl.where(best2 > 0, best2, first))
    copied = tl.load(own + after + (lane - 1 + end - after) % (end - after), mask=inside, other=0)
    position = first + lane
    column = tl.minimum(position // page_size, last_column)
    page = tl.load(page_table + req * stride_table + column, mask=inside, other=0)
    tl.store(at, tl.where(lane == 0, last, copied), mask=inside)
    tl.store(at + stride_packed, position, mask=inside)
    tl.store(at + 2 * stride_packed, page * page_size + position % page_size, mask=inside)
    tl.store(at + 4 * stride_packed, position + 1, mask=inside)


def advance(tokens: Tensor, packed: Tensor, history: Tensor, page_table: Tensor, page_size: int) -> Tensor:
    """See `minisgl.plugins.kernels.ops.rounds.advance`."""
    rows, width = tokens.shape
    accepted = torch.empty(rows, dtype=torch.int32, device=packed.device)
    advance_kernel[(rows,)](
        tokens, packed, history, page_table, accepted,
        tokens.stride(0), packed.stride(0), history.stride(0), page_table.stride(0), page_size,
        history.shape[1] - 1, page_table.shape[1] - 1, width,
        LANES=max(LANES, triton.next_power_of_2(width)), BLOCK=BLOCK, num_warps=8, **starts_early(tokens),
    )  # fmt: skip
    return accepted
