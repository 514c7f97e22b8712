"""Tests of `Meeting`, in-memory collectives: results, records, and errors if ranks call different collectives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from minisgl.distributed import Communicator
from minisgl.testing.communicator import CommunicatorConformance
from minisgl.testing.meeting import Meeting, MeetingViolation


class TestMeetingRanks(CommunicatorConformance):
    """The communicator kit applied to the communicators of `Meeting`."""

    sizes = (2, 3, 4)

    def make(self, rank: int, size: int, address: str) -> Communicator:
        assert size == 1  # the kit calls `make` only for one rank, because `on_ranks` is overridden
        return Meeting(1).run(lambda comm: comm)[0]

    def on_ranks(self, size: int, work: Callable[[Any], Any]) -> list[Any]:
        return Meeting(size).run(work)


def test_records() -> None:
    """`Meeting.collectives` lists the completed collectives with their sizes."""
    meeting = Meeting(2)
    meeting.run(lambda comm: (comm.all_reduce(torch.ones(2, 3)), comm.all_gather(torch.ones(5))))
    assert [(each.kind, each.nbytes) for each in meeting.collectives] == [("all_reduce", 24), ("all_gather", 20)]


@pytest.mark.parametrize(
    ("work", "message"),
    [
        (
            lambda c: c.all_reduce(torch.ones(2 + c.rank)),
            r"rank 0 called all_reduce of \[2\] .*, but rank 1 called .* of \[3\]",
        ),
        (
            lambda c: c.all_reduce(torch.ones(2)) if c.rank else c.all_gather(torch.ones(2)),
            "all_gather of .*all_reduce",
        ),
        (lambda c: c.rank or c.all_reduce(torch.ones(2)), "rank 0 waits in all_reduce of .*, but .* has ended"),
    ],
)
def test_mismatch(work: Callable[[Any], Any], message: str) -> None:
    """Ranks that do not call the same collective get an error that names their calls."""
    with pytest.raises(MeetingViolation, match=message):
        Meeting(2).run(work)


def test_error_of_a_rank() -> None:
    """The error of a rank ends the ranks that wait for it, and is raised."""

    def work(comm: Any) -> None:
        if comm.rank == 1:
            raise KeyError("mine")
        comm.all_reduce(torch.ones(1))

    with pytest.raises(KeyError, match="mine"):
        Meeting(3).run(work)
