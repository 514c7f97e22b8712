"""The sum over ranks of a few rows, with what follows it: the next layer's residual add and RMSNorm.

Every rank pushes its rows into the mailboxes of the others and sums what it finds in its own. Here is how mailboxes are
laid out, and the plain torch version of what a rank computes from them; the launch is `minisgl.kernel.triton.reduce`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from torch import Tensor

TURNS = 3
"""Messages that a place of a mailbox holds one after another: one being read, one that a faster peer may already push,
and one being emptied for the message after that."""

EMPTY = {2: -(1 << 15), 4: -0x7FFF8000}
"""What stands in a mailbox where nothing has come yet, as bits, by an element's bytes: in two bytes -0.0, in four the
same twice, which is a float32 of 5e-41. For these, 0 is sent."""


def bits_of(dtype: torch.dtype) -> torch.dtype | None:
    """The integers in which elements of ``dtype`` are sent; None for what can't be sent."""
    return {torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.float32: torch.int32}.get(dtype)


class Mailboxes(NamedTuple):
    """``boxes[r]`` is rank r's, [rows, TURNS, size, dim], int16 or int32: the bits of ``dtype``. All can be written
    from here; only the own one is read. Row i of every message goes to row i of a box, whatever else is in the message,
    so each row has its own count of messages, ``turns`` [rows] int32."""

    rank: int
    boxes: tuple[Tensor, ...]
    turns: Tensor
    dtype: torch.dtype

    @property
    def rows(self) -> int:
        return self.boxes[0].shape[0]

    @property
    def dim(self) -> int:
        return self.boxes[0].shape[3]

    def fits(self, x: Tensor) -> bool:
        """Whether x [rows, dim] can be summed through them."""
        return (
            x.dim() == 2
            and x.dtype == self.dtype
            and 0 < x.shape[0] <= self.rows
            and x.shape[1] == self.dim
            and x.stride(1) == 1
        )


def mailbox_bytes(message: int, size: int) -> int:
    """What a rank's mailboxes take, for messages of up to so many bytes among ``size`` ranks."""
    return message * TURNS * size


def empty(part: Tensor) -> None:
    """Make the bytes of a rank's mailboxes empty."""
    part.view(torch.int16).fill_(EMPTY[2])


def cut_mailboxes(parts: Sequence[Tensor], rank: int, like: Tensor) -> Mailboxes | None:
    """Mailboxes for rows as those of ``like`` [·, dim], as many as ``parts`` hold: the bytes of each rank, all of them
    empty. None for what can't be summed through mailboxes."""
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
    """What `minisgl.kernel.triton.reduce.all_reduce_norm` computes, from every rank's x [rows, dim] in rank order."""
    from minisgl.kernel.norm import add_rms_norm

    total = parts[0].float()
    for part in (*parts[1:], residual):
        total = total + part.float()
    total = total.to(residual.dtype)
    return add_rms_norm(torch.zeros_like(total), total, weight, eps)
