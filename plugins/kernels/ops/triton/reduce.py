"""All-reduce in one Triton launch, alone or with residual add and RMSNorm; one program per row.

A program writes its row into every peer's mailbox over NVLink, then polls its own mailbox until no element is empty.
The data itself signals its arrival, so no flag and no memory fence are needed (the idea of NCCL's LL protocol and of
TensorRT-LLM's all-reduce). `minisgl.plugins.kernels.ops.reduce` defines the mailboxes.

Why no message is overwritten before it was read: message n + 2 of a row goes into the buffer of message n - 1. A peer
sends message n + 2 only after it has summed message n + 1. For that sum the peer needed this rank's message n + 1,
which this rank sent only after it had read message n and reset the buffer of message n - 1. The counters of messages
are in device memory and no argument changes between launches, so a CUDA graph can replay the kernel.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl.plugins.kernels.ops.reduce import EMPTY, TURNS, Mailboxes
from minisgl.plugins.kernels.ops.triton.early import start_next, starts_early, wait_for_previous


@triton.jit
def all_reduce_kernel(
    x, residual, weight, out, boxes, turns, stride_x, stride_residual, eps,
    RANK: tl.constexpr, SIZE: tl.constexpr, TURNS: tl.constexpr, NOTHING: tl.constexpr,
    DIM: tl.constexpr, NORM: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    """All-reduce one row: send it to all peers and sum the rows of all ranks.

    With NORM, also add the residual and normalise. One program per row. ``boxes`` and ``turns`` are those of
    `minisgl.plugins.kernels.ops.reduce.Mailboxes`; NOTHING is `EMPTY`.
    """
    row = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    real = i < DIM
    if NORM:
        scales = tl.load(weight + i, mask=real, other=0.0)
    if EARLY:
        start_next()
        wait_for_previous()
    value = tl.load(x + row * stride_x + i, mask=real, other=0.0)
    dtype = value.dtype
    bits = value.to(boxes[RANK].dtype.element_ty, bitcast=True)
    bits = tl.where(bits == NOTHING, 0, bits)  # this bit pattern would mean "not yet written"
    turn = tl.load(turns + row)
    offset = (row * TURNS + turn % TURNS) * SIZE * DIM + i
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            tl.store(boxes[peer] + offset + RANK * DIM, bits, mask=real)
    if NORM:  # load now, so that the residual arrives while the program waits for the peers' rows
        added = tl.load(residual + row * stride_residual + i, mask=real, other=0.0)

    # Every rank sums in rank order: all ranks get the same bits, so their residual streams stay identical.
    total = tl.zeros([BLOCK], tl.float32)
    for peer in tl.static_range(SIZE):
        part = bits
        if peer != RANK:
            at = boxes[RANK] + offset + peer * DIM
            part = tl.load(at, mask=real, other=0, volatile=True)
            while tl.max((part == NOTHING).to(tl.int32), 0) > 0:
                part = tl.load(at, mask=real, other=0, volatile=True)
        total += part.to(dtype, bitcast=True).to(tl.float32)

    emptied = (row * TURNS + (turn + TURNS - 1) % TURNS) * SIZE * DIM + i
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            tl.store(boxes[RANK] + emptied + peer * DIM, tl.full([BLOCK], NOTHING, bits.dtype), mask=real)
    tl.debug_barrier()  # all threads must have read `turn` before it is changed
    tl.store(turns + row, (turn + 1) % TURNS)

    if NORM:
        total += added.to(tl.float32)
    value = total.to(dtype)
    tl.store(x + row * stride_x + i, value, mask=real)
    if NORM:
        wide = value.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, 0) / DIM + eps)
        tl.store(out + row * DIM + i, (wide * scale * scales.to(tl.float32)).to(dtype), mask=real)


def all_reduce(x: Tensor, mailboxes: Mailboxes) -> Tensor:
    """Sum x [rows, dim] over all ranks, write the sum over x and return x."""
    _launch(x, x, x, x, 0.0, mailboxes, norm=False)
    return x


def all_reduce_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, mailboxes: Mailboxes
) -> tuple[Tensor, Tensor]:
    """Return ``(rms_norm(sum + residual), sum + residual)``, where sum is x summed over all ranks.

    x and residual are [rows, dim]. The second result is written over x. The sum over ranks is not rounded before the
    residual is added.
    """
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, residual, weight, out, eps, mailboxes, norm=True)
    return out, x


def _launch(
    x: Tensor, residual: Tensor, weight: Tensor, out: Tensor, eps: float, mailboxes: Mailboxes, norm: bool
) -> None:
    block = triton.next_power_of_2(mailboxes.dim)
    all_reduce_kernel[(x.shape[0],)](
        x, residual, weight, out, mailboxes.boxes, mailboxes.turns, x.stride(0), residual.stride(0), eps,
        RANK=mailboxes.rank, SIZE=len(mailboxes.boxes), TURNS=TURNS, NOTHING=EMPTY[x.element_size()],
        DIM=mailboxes.dim, NORM=norm, BLOCK=block, num_warps=min(16, max(1, block // 256)), **starts_early(x),
    )  # fmt: skip
