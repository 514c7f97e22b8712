"""The sum over ranks of a few rows, with what follows it: the next layer's residual add and RMSNorm.

Every rank pushes its rows into the mailboxes of the others and sums what it finds in its own. Here is how mailboxes are
laid out, and the plain torch version of what a rank computes from them; the launch is `minisgl.kernel.triton.reduce`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minisgl.kernel.norm import add_rms_norm

TURNS = 3
"""Messages that a place of a mailbox holds one after another: one being read, one that a faster peer may already push,
and one being emptied for the message after that."""

EMPTY = {torch.int16: -(1 << 15), torch.int32: -(1 << 31)}
"""What stands in a mailbox where nothing has come yet: the bits of -0.0, for which 0.0 is sent."""

BITS = {torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.float32: torch.int32}


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


def make_mailboxes(
    allocate: Callable[[tuple[int, ...], torch.dtype], Sequence[Tensor]],
    meet: Callable[[], Any],
    rank: int,
    size: int,
    rows: int,
    like: Tensor,
) -> Mailboxes:
    """Empty mailboxes for up to ``rows`` rows as those of ``like`` [·, dim].

    ``allocate(shape, dtype)`` returns a tensor on each rank that all ranks can write; ``meet()`` returns when every
    rank has called it: nobody may push into a box that its owner has not emptied.
    """
    bits = BITS[like.dtype]
    boxes = tuple(allocate((rows, TURNS, size, like.shape[1]), bits))
    boxes[rank].fill_(EMPTY[bits])
    turns = torch.zeros(rows, dtype=torch.int32, device=like.device)
    if like.is_cuda:
        torch.cuda.synchronize(like.device)
    meet()
    return Mailboxes(rank, boxes, turns, like.dtype)


def sum_add_norm(parts: Sequence[Tensor], residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """What `minisgl.kernel.triton.reduce.all_reduce_norm` computes, from every rank's x [rows, dim] in rank order."""
    total = parts[0].float()
    for part in (*parts[1:], residual):
        total = total + part.float()
    total = total.to(residual.dtype)
    return add_rms_norm(torch.zeros_like(total), total, weight, eps)
