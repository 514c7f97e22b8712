"""Ranks that meet in memory: collectives of threads, exact, counted, and never waited for in vain.

A collective takes place when every rank has come; where ranks come to different ones, or one has gone home, that is
known at once, and who did what is said. Sums are in rank order, so they are the same bits on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from minisgl.kernel.launch import one_launch
from minisgl.kernel.norm import add_rms_norm
from minisgl.testing.threads import Gone, RankThreads

__all__ = ["Collective", "Meeting", "MeetingViolation"]

T = TypeVar("T")


class MeetingViolation(AssertionError):  # noqa: N818 - as the simulated engine's violations are called
    """The ranks did not come to the same collective."""


@dataclass(frozen=True)
class Collective:
    """One that took place: ``all_reduce``, ``all_gather``, ``broadcast`` or ``exchange``; each rank's part of it."""

    kind: str
    parts: tuple[Any, ...]

    @property
    def nbytes(self) -> int:
        """Of one rank's tensor."""
        return int(self.parts[0].nbytes) if isinstance(self.parts[0], Tensor) else len(self.parts[0])


class Meeting(RankThreads):
    """``size`` ranks; ``held`` are the collectives that took place, in order."""

    def __init__(self, size: int):
        super().__init__(size)
        self.held: list[Collective] = []
        self._come: dict[int, tuple[str, Any]] = {}

    def run(self, work: Callable[[Any], T]) -> list[T]:
        """``work(communicator)`` on each rank; the results in rank order. Raises what the first rank to fail raised,
        `MeetingViolation` among that."""
        return self._run(lambda rank: work(_Rank(self, rank)))

    def _left(self, rank: int) -> None:
        self._check(f"rank {rank} is done")

    def _meet(self, rank: int, kind: str, part: Any) -> Collective:
        kept = part.clone() if isinstance(part, Tensor) else part
        with self._changed:
            number = len(self.held)
            self._come[rank] = (kind, kept)
            self._check()
            while len(self.held) == number:
                if self._errors:
                    raise Gone
                self._changed.wait(0.5)
            return self.held[number]

    def _check(self, why: str = "another is done") -> None:
        """Whether all have come; or whether those who have can no longer be joined by everybody."""
        come = {rank: self._told(*found) for rank, found in sorted(self._come.items())}
        if self._errors or not come:
            return
        first, what = next(iter(come.items()))
        other = next((rank for rank in come if come[rank] != what), None)
        if other is not None:
            self._fail(MeetingViolation(f"rank {first} came to {what}, rank {other} to {come[other]}"))
        elif len(come) == self.size:
            self.held.append(Collective(self._come[0][0], tuple(self._come[rank][1] for rank in range(self.size))))
            self._come = {}
            self._changed.notify_all()
        elif len(self._running) < self.size:
            self._fail(MeetingViolation(f"rank {first} waits in {what}, and {why}"))

    @staticmethod
    def _told(kind: str, part: Any) -> str:
        if not isinstance(part, Tensor):
            return kind
        return f"{kind} of {list(part.shape)} {str(part.dtype).removeprefix('torch.')}"


class _Rank:
    """One rank's communicator (`minisgl.distributed.Communicator`)."""

    def __init__(self, meeting: Meeting, rank: int):
        self._meeting, self.rank, self.size = meeting, rank, meeting.size

    @one_launch
    def all_reduce(self, x: Tensor) -> Tensor:
        parts = self._meeting._meet(self.rank, "all_reduce", x).parts
        return torch.stack(parts).sum(0, dtype=x.dtype)

    def all_reduce_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return add_rms_norm(self.all_reduce(x), residual, weight, eps)

    @one_launch
    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        return torch.cat(self._meeting._meet(self.rank, "all_gather", x).parts, dim)

    def broadcast(self, x: Tensor, src: int = 0) -> Tensor:
        return x.copy_(self._meeting._meet(self.rank, "broadcast", x).parts[src])

    def exchange(self, data: bytes) -> list[bytes]:
        return list(self._meeting._meet(self.rank, "exchange", data).parts)

    @contextmanager
    def capturing(self) -> Iterator[None]:
        yield

    def close(self, abort: bool = False) -> None:
        """Nothing to end."""
