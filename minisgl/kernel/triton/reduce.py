"""The sum over ranks in one launch, in Triton, alone or with residual add and RMSNorm; one program a row.

A program pushes its row into every peer's mailbox over NVLink, then reads its own box until no element is empty any
more. The data is its own signal, so there is no flag to send after it and no fence to wait for between the two (the
idea is NCCL's LL protocol, and TensorRT-LLM's all-reduce). What mailboxes are is in `minisgl.kernel.reduce`.

Why nothing is overwritten before it was read: a rank pushes message n + 2 of a row when it has summed message n + 1,
for which it needed this rank's message n + 1, which left after this rank had read message n and emptied the place of
n - 1, the one that n + 2 goes to. Nothing here depends on the launch, so a CUDA graph can replay it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernel.reduce import EMPTY, TURNS, Mailboxes
from minisgl.kernel.triton.early import start_next, starts_early, wait_for_previous


@triton.jit
def all_reduce_kernel(
    x, residual, weight, out, boxes, turns, stride_x, stride_residual, eps,
    RANK: tl.constexpr, SIZE: tl.constexpr, TURNS: tl.constexpr, NOTHING: tl.constexpr,
    DIM: tl.constexpr, NORM: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
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
    bits = tl.where(bits == NOTHING, 0, bits)  # that would mean that nothing came
    turn = tl.load(turns + row)
    place = (row * TURNS + turn % TURNS) * SIZE * DIM + i
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            tl.store(boxes[peer] + place + RANK * DIM, bits, mask=real)
    if NORM:  # asked for now, so that it is there when the peers' rows are
        added = tl.load(residual + row * stride_residual + i, mask=real, other=0.0)

    # In the order of ranks on every rank: all get the same bits, and their residual streams never part.
    total = tl.zeros([BLOCK], tl.float32)
    for peer in tl.static_range(SIZE):
        part = bits
        if peer != RANK:
            at = boxes[RANK] + place + peer * DIM
            part = tl.load(at, mask=real, other=0, volatile=True)
            while tl.max((part == NOTHING).to(tl.int32), 0) > 0:
                part = tl.load(at, mask=real, other=0, volatile=True)
        total += part.to(dtype, bitcast=True).to(tl.float32)

    emptied = (row * TURNS + (turn + TURNS - 1) % TURNS) * SIZE * DIM + i
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            tl.store(boxes[RANK] + emptied + peer * DIM, tl.full([BLOCK], NOTHING, bits.dtype), mask=real)
    tl.debug_barrier()  # every thread has read its turn
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
    """The sum over ranks of x [rows, dim], written over x."""
    _launch(x, x, x, x, 0.0, mailboxes, norm=False)
    return x


def all_reduce_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, mailboxes: Mailboxes
) -> tuple[Tensor, Tensor]:
    """``(rms_norm(sum + residual), sum + residual)``, the latter written over x; the sum is not rounded in between."""
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
