"""Sorting of (token, choice) pairs by expert in two or three Triton launches: a counting sort without atomics.

The pairs are divided into chunks. The first launch counts each chunk's pairs of each expert, and the last one puts each
chunk's pairs behind those of earlier chunks. With many chunks, a launch between them adds up the counts of earlier
chunks; with few, every program of the last launch does so. The sort is stable, so its result is the same in every run.
`minisgl.plugins.kernels.ops.align` has the torch reference and describes arguments and results.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl.plugins.kernels.ops.blocks import max_blocks
from minisgl.plugins.kernels.ops.triton.early import start_next, starts_early, wait_for_previous

MAX_CHUNKS = 1024
"""The most programs of a launch."""
MAX_SUMMED_CHUNKS = 128
"""The most chunks whose counts every program of the last launch adds up itself."""
SCANNED_EXPERTS = 16
"""Experts of a program of `scan_kernel`."""
ITERATION = 64
"""Pairs of an iteration. `place_kernel` compares each of them with all others of the same iteration."""


@triton.jit(do_not_specialize=["n", "first", "chunk", "capacity", "fill"])
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
        count += tl.histogram(here, BLOCK_E, (start + i < end) & (here >= 0) & (here < EXPERTS))
    tl.store(counts + program * BLOCK_E + expert, count)
    end = tl.minimum((program + 1) * fill, capacity)
    for start in range(program * fill, end, BLOCK):
        tl.store(pairs + start + i, tl.full([BLOCK], 0, tl.int32) + n, mask=start + i < end)


@triton.jit(do_not_specialize=["chunks"])
def scan_kernel(
    counts, chunks, BLOCK_E: tl.constexpr, BLOCK_C: tl.constexpr, EXPERTS: tl.constexpr, EARLY: tl.constexpr = False
):
    """Replace each chunk's counts by the sums over the chunks before it; the row after them gets the sums of all.

    One program: EXPERTS experts.
    """
    chunk, expert = tl.arange(0, BLOCK_C), tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    at, real = counts + chunk[:, None] * BLOCK_E + expert[None, :], chunk[:, None] < chunks
    if EARLY:
        start_next()
        wait_for_previous()
    count = tl.load(at, mask=real, other=0)
    tl.store(at, tl.cumsum(count, 0) - count, mask=real)
    tl.store(counts + chunks * BLOCK_E + expert, tl.sum(count, 0))


@triton.jit(do_not_specialize=["n", "first", "chunk", "chunks", "blocks", "own"])
def place_kernel(
    ids, counts, pairs, owner, n, first, chunk, chunks, blocks, own,
    SIZE: tl.constexpr, EXPERTS: tl.constexpr, SCANNED: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_O: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    """Write one chunk's pairs behind those of earlier chunks, expert by expert. One program per chunk.

    With SCANNED the counts come from `scan_kernel`. Each program also writes the owning expert of ``own`` blocks.
    """
    program, expert, i = tl.program_id(0), tl.arange(0, BLOCK_E), tl.arange(0, BLOCK)
    other = tl.arange(0, BLOCK_C)
    if EARLY:
        start_next()
        wait_for_previous()
    if SCANNED:
        earlier = tl.load(counts + program * BLOCK_E + expert)
        total = tl.load(counts + chunks * BLOCK_E + expert)
    else:
        each = tl.load(counts + other[:, None] * BLOCK_E + expert[None, :], mask=other[:, None] < chunks, other=0)
        earlier, total = tl.sum(tl.where(other[:, None] < program, each, 0), 0), tl.sum(each, 0)
    padded = tl.cdiv(total, SIZE) * SIZE
    ends = tl.cumsum(padded, 0)
    free = ends - padded + earlier
    end = tl.minimum((program + 1) * chunk, n)
    for start in range(program * chunk, end, BLOCK):
        here = tl.load(ids + start + i, mask=start + i < end, other=-1) - first
        mine = (start + i < end) & (here >= 0) & (here < EXPERTS)
        # The rank of a pair is the number of earlier pairs of the same expert. Pairs that are not stored get any rank.
        same = (here[:, None] == here[None, :]) & (i[None, :] < i[:, None])
        place = tl.gather(free, tl.where(mine, here, 0), 0) + tl.sum(same.to(tl.int32), 1)
        tl.store(pairs + place, start + i, mask=mine)
        free += tl.histogram(here, BLOCK_E, mine)
    last = tl.max(ends, 0)
    end = tl.minimum((program + 1) * own, blocks)
    for start in range(program * own, end, BLOCK_O):
        block = start + tl.arange(0, BLOCK_O)
        of = tl.sum((ends[None, :] <= block[:, None] * SIZE).to(tl.int32), 1)
        tl.store(owner + block, tl.where(block * SIZE < last, of, -1), mask=block < end)


def align(ids: Tensor, first: int, experts: int, block: int) -> tuple[Tensor, Tensor]:
    """Compute `minisgl.plugins.kernels.ops.align.align` on a GPU."""
    n, block_e = ids.numel(), max(16, triton.next_power_of_2(experts))
    chunk = triton.cdiv(triton.cdiv(n, MAX_CHUNKS), ITERATION) * ITERATION
    chunks = triton.cdiv(n, chunk)
    scanned = chunks > MAX_SUMMED_CHUNKS
    blocks = max_blocks(n, experts, block)
    block_o = min(ITERATION, 8192 // block_e)  # each of these blocks is compared with block_e experts
    own = triton.cdiv(triton.cdiv(blocks, chunks), block_o) * block_o
    pairs = torch.empty(blocks * block, dtype=torch.int32, device=ids.device)
    owner = torch.empty(blocks, dtype=torch.int32, device=ids.device)
    counts = torch.empty((chunks + 1, block_e), dtype=torch.int32, device=ids.device)
    count_kernel[(chunks,)](
        ids, counts, pairs, n, first, chunk, len(pairs), triton.cdiv(len(pairs), chunks),
        EXPERTS=experts, BLOCK_E=block_e, BLOCK=ITERATION, num_warps=4, **starts_early(ids),
    )  # fmt: skip
    if scanned:
        scan_kernel[(block_e // SCANNED_EXPERTS,)](
            counts, chunks, BLOCK_E=block_e, BLOCK_C=triton.next_power_of_2(MAX_CHUNKS), EXPERTS=SCANNED_EXPERTS,
            num_warps=8, **starts_early(ids),
        )  # fmt: skip
    place_kernel[(chunks,)](
        ids, counts, pairs, owner, n, first, chunk, chunks, blocks, own, SIZE=block, EXPERTS=experts, SCANNED=scanned,
        BLOCK_E=block_e, BLOCK_C=1 if scanned else triton.next_power_of_2(chunks), BLOCK=ITERATION, BLOCK_O=block_o,
        num_warps=4 if scanned else 8, **starts_early(ids),
    )  # fmt: skip
    return pairs, owner
