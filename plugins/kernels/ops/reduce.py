"""Mailboxes for the one-launch all-reduce of a few rows, fused with the residual add and RMSNorm that follow.

Every rank writes its rows into the mailboxes of all other ranks, and sums its own rows and those that arrive in its own
mailbox. This module defines the memory layout of a mailbox and the torch reference of the sum. The kernel is
`minisgl.plugins.kernels.ops.triton.reduce`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from torch import Tensor

TURNS = 3
"""Buffers per row and sender in a mailbox, used in turn by successive messages. One buffer is being read; a faster peer
may already be writing its next message into the second; the third is being reset to `EMPTY` for the message after
that."""

EMPTY = {2: -(1 << 15), 4: -0x7FFF8000}
"""The bit pattern that marks an element of a mailbox as not yet written, by element size in bytes.

For 2 bytes it is -0.0; for 4 bytes it is that pattern twice, which as a float32 is a denormal near -5e-41. A sender
replaces an element that has this bit pattern by 0.
"""


def bits_of(dtype: torch.dtype) -> torch.dtype | None:
    """Return the integer dtype as which elements of ``dtype`` are sent, or None if ``dtype`` can't be sent."""
    return {torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.float32: torch.int32}.get(dtype)


class Mailboxes(NamedTuple):
    """The mailboxes of all ranks, as tensors on this rank.

    ``boxes[r]`` is the mailbox on rank r's GPU: [rows, TURNS, size, dim], int16 or int32, holding the bits of
    ``dtype``; its third dimension is the sending rank. This rank writes to the boxes of all other ranks and reads only
    ``boxes[rank]``. Row i of every message goes to row i of a box. Messages differ in length, so each row counts its
    messages separately: ``turns`` [rows] int32.
    """

    rank: int
    boxes: tuple[Tensor, ...]
    turns: Tensor
    dtype: torch.dtype

    @property
    def rows(self) -> int:
        """The largest number of rows of a message."""
        return self.boxes[0].shape[0]

    @property
    def dim(self) -> int:
        """Elements per row."""
        return self.boxes[0].shape[3]

    def fits(self, x: Tensor) -> bool:
        """Return whether x [rows, dim] can be summed through these mailboxes."""
        return (
            x.dim() == 2
            and x.dtype == self.dtype
            and 0 < x.shape[0] <= self.rows
            and x.shape[1] == self.dim
            and x.stride(1) == 1
        )


def mailbox_bytes(message: int, size: int) -> int:
    """Return the bytes of one rank's mailbox, for messages of up to ``message`` bytes among ``size`` ranks."""
    return message * TURNS * size


def empty(part: Tensor) -> None:
    """Fill the bytes of a rank's mailbox with the `EMPTY` pattern."""
    part.view(torch.int16).fill_(EMPTY[2])


def cut_mailboxes(parts: Sequence[Tensor], rank: int, like: Tensor) -> Mailboxes | None:
    """Lay mailboxes out in the shared memory ``parts``, for rows like those of ``like`` [·, dim].

    ``parts[r]`` is the memory on rank r's GPU, filled by `empty`. The mailboxes have as many rows as fit into it.
    Returns None if ``like`` is not two-dimensional, its dtype can't be sent, or not even one row fits.
    """
    bits = bits_of(like.dtype)
    if like.dim() != 2 or bits is None:
        return None
    size, dim = len(parts), like.shape[1]
    each = mailbox_bytes(dim * like.element_size(), size)
    rows = parts[0].nbytes // each
    if rows == 0:
        return None
    boxes = tuple(part[: rows * each].view(bits).view(rows, TURNS, size, dim) for part in parts)
    return Mailboxes(rank, boxes, torch.zeros(rows, dtype=torch.int32, device=like.device), like.dtype)


def sum_add_norm(parts: Sequence[Tensor], residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Compute `minisgl.plugins.kernels.ops.triton.reduce.all_reduce_norm` in plain torch: the torch reference.

    ``parts`` holds every rank's x [rows, dim] in rank order. Returns ``(rms_norm(sum + residual), sum + residual)``.
    """
    from minisgl.plugins.kernels.ops.norm import add_rms_norm

    total = parts[0].float()
    for part in (*parts[1:], residual):
        total = total + part.float()
    total = total.to(residual.dtype)
    return add_rms_norm(torch.zeros_like(total), total, weight, eps)
