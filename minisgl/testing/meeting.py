"""Ranks that meet in memory: collectives of threads, exact, counted, and never waited for in vain.

A collective takes place when every rank has come; where ranks come to different ones, or one has gone home, that is
known at once, and who did what is said. Sums are in rank order, so they are the same bits on all ranks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from minisgl.kernel.launch import one_launch
from minisgl.kernel.norm import add_rms_norm

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


class _Gone(Exception):  # noqa: N818
    """Another rank has failed: end quietly."""


class Meeting:
    """``size`` ranks; ``held`` are the collectives that took place, in order."""

    def __init__(self, size: int):
        self.size = size
        self.held: list[Collective] = []
        self._changed = threading.Condition()
        self._come: dict[int, tuple[str, Any]] = {}
        self._running: set[int] = set()
        self._errors: list[BaseException] = []

    def run(self, work: Callable[[Any], T]) -> list[T]:
        """``work(communicator)`` on each rank; the results in rank order. Raises what the first rank to fail raised,
        `MeetingViolation` among that."""
        results: dict[int, T] = {}

        def one(rank: int) -> None:
            try:
                with torch.inference_mode():
                    results[rank] = work(_Rank(self, rank))
            except _Gone:
                pass
            except BaseException as error:
                self._fail(error)
            finally:
                with self._changed:
                    self._running.discard(rank)
                    self._check(f"rank {rank} is done")

        self._running = set(range(self.size))
        threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(0.5)  # so that an alarm is heard
        if self._errors:
            raise self._errors[0]
        return [results[rank] for rank in range(self.size)]

    def _meet(self, rank: int, kind: str, part: Any) -> Collective:
        kept = part.clone() if isinstance(part, Tensor) else part
        with self._changed:
            number = len(self.held)
            self._come[rank] = (kind, kept)
            self._check()
            while len(self.held) == number:
                if self._errors:
                    raise _Gone
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

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._errors.append(error)
            self._changed.notify_all()


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
