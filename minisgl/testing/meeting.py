"""In-memory collectives between ranks that are threads of one process: exact, recorded, and checked for mismatches.

A collective runs when every rank has called it. If two ranks call different collectives, or if a rank has ended while
another waits, `Meeting` raises an error at once that names the ranks and their calls. Sums are computed in rank order,
so all ranks get the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from minisgl.distributed import Communicator
from minisgl.plugins.kernels.ops.norm import add_rms_norm
from minisgl.testing.threads import RankStopped, RankThreads
from minisgl.utils.launch import one_launch

__all__ = ["Collective", "Meeting", "MeetingViolation"]

T = TypeVar("T")


class MeetingViolation(AssertionError):  # noqa: N818 - named like `SimViolation`
    """The ranks did not all call the same collective."""


@dataclass(frozen=True)
class Collective:
    """A collective that was completed.

    ``kind`` is ``all_reduce``, ``all_gather``, ``broadcast`` or ``exchange``. ``parts`` are the tensors (for
    ``exchange``: the bytes) that the ranks passed, in rank order.
    """

    kind: str
    parts: tuple[Any, ...]

    @property
    def nbytes(self) -> int:
        """Size in bytes of rank 0's part."""
        return int(self.parts[0].nbytes) if isinstance(self.parts[0], Tensor) else len(self.parts[0])


class Meeting(RankThreads):
    """``size`` ranks. ``collectives`` are the completed collectives, in order."""

    def __init__(self, size: int):
        super().__init__(size)
        self.collectives: list[Collective] = []
        self._calls: dict[int, tuple[str, Any]] = {}  # rank -> (kind, part) of the collective in which it waits

    def run(self, work: Callable[[Any], T]) -> list[T]:
        """Run ``work(communicator)`` on each rank and return the results in rank order.

        Raise the error of the rank that failed first, or `MeetingViolation`.
        """
        return self._run(lambda rank: work(_Rank(self, rank)))

    def _on_rank_end(self, rank: int) -> None:
        self._check(f"rank {rank} has ended")

    def _call(self, rank: int, kind: str, part: Any) -> Collective:
        """Wait until all ranks have called the collective ``kind``, and return it."""
        kept = part.clone() if isinstance(part, Tensor) else part
        with self._changed:
            number = len(self.collectives)
            self._calls[rank] = (kind, kept)
            self._check()
            while len(self.collectives) == number:
                if self._errors:
                    raise RankStopped
                self._changed.wait(0.5)
            return self.collectives[number]

    def _check(self, why: str = "another rank has ended") -> None:
        """Complete the collective if all ranks have called it. Fail if it can no longer be completed."""
        calls = {rank: self._describe(*call) for rank, call in sorted(self._calls.items())}
        if self._errors or not calls:
            return
        first, what = next(iter(calls.items()))
        other = next((rank for rank in calls if calls[rank] != what), None)
        if other is not None:
            self._fail(MeetingViolation(f"rank {first} called {what}, but rank {other} called {calls[other]}"))
        elif len(calls) == self.size:
            kind, parts = self._calls[0][0], tuple(self._calls[rank][1] for rank in range(self.size))
            self.collectives.append(Collective(kind, parts))
            self._calls = {}
            self._changed.notify_all()
        elif len(self._running) < self.size:
            self._fail(MeetingViolation(f"rank {first} waits in {what}, but {why}"))

    @staticmethod
    def _describe(kind: str, part: Any) -> str:
        if not isinstance(part, Tensor):
            return kind
        return f"{kind} of {list(part.shape)} {str(part.dtype).removeprefix('torch.')}"


class _Rank(Communicator):
    """The communicator of one rank."""

    def __init__(self, meeting: Meeting, rank: int):
        self._meeting, self.rank, self.size = meeting, rank, meeting.size

    @one_launch
    def all_reduce(self, x: Tensor) -> Tensor:
        parts = self._meeting._call(self.rank, "all_reduce", x).parts
        return torch.stack(parts).sum(0, dtype=x.dtype)

    def all_reduce_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return add_rms_norm(self.all_reduce(x), residual, weight, eps)

    @one_launch
    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        return torch.cat(self._meeting._call(self.rank, "all_gather", x).parts, dim)

    def broadcast(self, x: Tensor, src: int = 0) -> Tensor:
        return x.copy_(self._meeting._call(self.rank, "broadcast", x).parts[src])

    def exchange(self, data: bytes) -> list[bytes]:
        return list(self._meeting._call(self.rank, "exchange", data).parts)

    def close(self, abort: bool = False) -> None:
        """Do nothing: the communicator holds no resources."""
