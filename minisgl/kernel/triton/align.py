"""Sorting of (token, choice) pairs by expert in two Triton launches: a counting sort without atomics.

The sort is stable, so its result is the same in every run. `minisgl.kernel.align` has the torch reference and describes
arguments and results.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernel.blocks import max_blocks
from minisgl.kernel.triton.early import start_next, starts_early, wait_for_previous

MAX_CHUNKS = 128  # most programs of a launch; in the second launch each program reads all chunks' counts


@triton.jit
def count_kernel(
    ids, counts, pairs, n, first, chunk, capacity, fill,
    EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    """Count the pairs of each expert in one chunk of pairs. One program per chunk.

    Each program also initialises ``fill`` entries of ``pairs`` to the padding value n.
    """
    program, expert, i = tl.program_id(0), tl.arange(0, BLOCK_E), tl.arange(0, BLOCK)
    count = tl.zeros([BLOCK_E], tl.int32)
    if EARLY:
        start_next()
        wait_for_previous()
    end = tl.minimum((program + 1) * chunk, n)
    for start in range(program * chunk, end, BLOCK):
        here = tl.load(ids + start + i, mask=start + i < end, other=-1) - first
        here = tl.where((start + i < end) & (here >= 0) & (here < EXPERTS), here, -1)
        count += tl.sum((here[:, None] == expert[None, :]).to(tl.int32), 0)
    tl.store(counts + program * BLOCK_E + expert, count)
    end = tl.minimum((program + 1) * fill, capacity)
    for start in range(program * fill, end, BLOCK):
        tl.store(pairs + start + i, tl.full([BLOCK], 0, tl.int32) + n, mask=start + i < end)


@triton.jit
def place_kernel(
    ids, counts, pairs, owner, n, first, chunk, chunks, blocks, own,
    SIZE: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr = False,
):  # fmt: skip
    """Write one chunk's pairs behind those of earlier chunks, expert by expert. One program per chunk.

    Each program also writes the owning expert of ``own`` blocks.
    """
    program, expert, i = tl.program_id(0), tl.arange(0, BLOCK_E), tl.arange(0, BLOCK)
    other = tl.arange(0, BLOCK_C)
    if EARLY:
        start_next()
        wait_for_previous()
    all_counts = tl.load(counts + other[:, None] * BLOCK_E + expert[None, :], mask=other[:, None] < chunks, other=0)
    padded = tl.cdiv(tl.sum(all_counts, 0), SIZE) * SIZE
    ends = tl.cumsum(padded, 0)
    free = ends - padded + tl.sum(tl.where(other[:, None] < program, all_counts, 0), 0)
    end = tl.minimum((program + 1) * chunk, n)
    for start in range(program * chunk, end, BLOCK):
        here = tl.load(ids + start + i, mask=start + i < end, other=-1) - first
        mine = (start + i < end) & (here >= 0) & (here < EXPERTS)
        is_of = (mine[:, None] & (here[:, None] == expert[None, :])).to(tl.int32)
        rank = tl.cumsum(is_of, 0) - 1
        place = tl.sum(is_of * (free[None, :] + rank), 1)
        tl.store(pairs + place, start + i, mask=mine)
        free += tl.sum(is_of, 0)
    last = tl.max(ends, 0)
    end = tl.minimum((program + 1) * own, blocks)
    for start in range(program * own, end, BLOCK):
        block = start + i
        of = tl.sum((ends[None, :] <= block[:, None] * SIZE).to(tl.int32), 1)
        tl.store(owner + block, tl.where(block * SIZE < last, of, -1), mask=block < end)


def align(ids: Tensor, first: int, experts: int, block: int) -> tuple[Tensor, Tensor]:
    """Compute `minisgl.kernel.align.align` on a GPU."""
    n, block_e = ids.numel(), max(16, triton.next_power_of_2(experts))
    step = max(16, 8192 // block_e)  # pairs per iteration: the tile of flags is [step, block_e]
    chunk = triton.cdiv(triton.cdiv(n, MAX_CHUNKS), step) * step
    chunks = triton.cdiv(n, chunk)
    blocks = max_blocks(n, experts, block)
    pairs = torch.empty(blocks * block, dtype=torch.int32, device=ids.device)
    owner = torch.empty(blocks, dtype=torch.int32, device=ids.device)
    counts = torch.empty((chunks, block_e), dtype=torch.int32, device=ids.device)
    count_kernel[(chunks,)](
        ids, counts, pairs, n, first, chunk, len(pairs), triton.cdiv(len(pairs), chunks),
        EXPERTS=experts, BLOCK_E=block_e, BLOCK=step, num_warps=4, **starts_early(ids),
    )  # fmt: skip
    place_kernel[(chunks,)](
        ids, counts, pairs, owner, n, first, chunk, chunks, blocks, triton.cdiv(blocks, chunks),
        SIZE=block, EXPERTS=experts, BLOCK_E=block_e, BLOCK_C=triton.next_power_of_2(chunks), BLOCK=step, num_warps=8,
        **starts_early(ids),
    )  # fmt: skip
    return pairs, owner
