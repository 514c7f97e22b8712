"""What the ranks of one model say to each other. Communicators are plugins; this names none."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Communicator"]


class Communicator(Protocol):
    """Collectives among the tensor-parallel ranks of one engine. At size 1 each of them does nothing."""

    rank: int
    size: int

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over ranks. The result may be another tensor than x; x may be clobbered."""

    def all_reduce_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """All-reduce x, add residual, RMS-normalise with weight: (normalised, new residual)."""

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        """Every rank's x, concatenated along dim in rank order."""

    def broadcast(self, x: Tensor, src: int = 0) -> Tensor:
        """Rank src's x, on every rank."""

    def exchange(self, data: bytes) -> list[bytes]:
        """Every rank's bytes, in rank order. At start-up only."""

    def capturing(self) -> AbstractContextManager[None]:
        """Entered around a graph capture."""

    def close(self, abort: bool = False) -> None:
        """End the link; ``abort``: a peer is gone, do not wait for it."""
