"""Calculates how long the messages of an all-reduce take on links with a given delay and bandwidth. Nothing is timed.

The model is LogGP: a rank is busy for a moment with each message that it sends or receives, its link carries one
message at a time in each direction, and a message arrives a fixed delay after its last byte was sent. Additions take no
time. Alexandrov et al., LogGP: Incorporating Long Messages into the LogP Model, 1995.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from minisgl.chapters.lab.grader.gate import Broken, Student
from minisgl.testing.wire import Wire

__all__ = ["BUSY_US", "BYTES_PER_US", "DELAY_US", "ELEMENTS", "RANKS", "TimedWire", "all_reduce_us"]

RANKS, ELEMENTS = 8, 1024
"""The all-reduce: its ranks, and the float32 elements that it sums, as in a decode step of one row."""
DELAY_US, BUSY_US, BYTES_PER_US = 5.0, 0.25, 25_000
"""Delay of a message, time that a rank is busy with it, and bandwidth of a link: 25 GB/s in each direction."""


class TimedWire(Wire):
    """A wire on which each rank has a clock. ``clock[r]`` is the time of rank r in microseconds, 0 at the start.

    The clocks depend only on the order in which each rank sends, receives and waits.
    """

    def __init__(self, size: int):
        super().__init__(size)
        self.clock = [0.0] * size
        self._sent_until, self._received_until = [0.0] * size, [0.0] * size  # when a rank's link is free
        self._arrivals: dict[tuple[int, int], list[float]] = {}  # (sender, receiver) -> time of each message
        self._received: dict[tuple[int, int], int] = {}  # (sender, receiver) -> how many receives were posted
        self._ends: dict[Any, float] = {}  # a send -> when its last byte has left
        self._sources: dict[Any, tuple[tuple[int, int], int]] = {}  # a receive -> which message it gets

    def _post(self, rank: int, other: int, x: Tensor, sends: bool) -> Any:
        if not sends:
            message = super()._post(rank, other, x, sends)
            number = self._received.get((other, rank), 0)
            self._received[other, rank] = number + 1
            self._sources[message] = (other, rank), number
            return message
        self.clock[rank] += BUSY_US
        end = max(self.clock[rank], self._sent_until[rank]) + x.nbytes / BYTES_PER_US
        self._sent_until[rank] = end
        self._arrivals.setdefault((rank, other), []).append(end + DELAY_US)  # before the receiver can see the message
        message = super()._post(rank, other, x, sends)
        self._ends[message] = end
        return message

    def _wait(self, message: Any) -> None:
        super()._wait(message)
        rank = message.rank
        if message in self._ends:
            self.clock[rank] = max(self.clock[rank], self._ends.pop(message))
        elif message in self._sources:
            pair, number = self._sources.pop(message)
            carried = self._received_until[rank] + message.x.nbytes / BYTES_PER_US
            self._received_until[rank] = end = max(self._arrivals[pair][number], carried)
            self.clock[rank] = max(self.clock[rank], end) + BUSY_US


def all_reduce_us(student: Student) -> float:
    """Return the calculated time in microseconds after which the slowest rank has the sum of the student's all-reduce.

    Raise `Broken` if a sum is wrong.
    """
    wire = TimedWire(RANKS)
    parts = [torch.full((ELEMENTS,), 8.0**rank) for rank in range(RANKS)]
    sums = wire.run(
        lambda rank, size: student.make(rank=rank, size=size, address="", device=torch.device("cpu")),
        lambda comm: comm.all_reduce(parts[comm.rank].clone()).clone(),
    )
    want = torch.stack(parts).sum(0)
    for rank, got in enumerate(sums):
        if not torch.equal(got, want):
            raise Broken("missing", "`all_reduce` returns the sum over all ranks.", f"The sum on rank {rank} is wrong.")
    return max(wire.clock)
