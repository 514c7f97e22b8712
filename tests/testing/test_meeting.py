"""Collectives in memory: right, counted, and ranks that miss each other are told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from minisgl.distributed import Communicator
from minisgl.testing.communicator import CommunicatorConformance
from minisgl.testing.meeting import Meeting, MeetingViolation


class TestMeetingRanks(CommunicatorConformance):
    """It keeps the rules of every communicator; at size 1 too."""

    sizes = (2, 3, 4)

    def make(self, rank: int, size: int, address: str) -> Communicator:
        assert size == 1
        return Meeting(1).run(lambda comm: comm)[0]

    def on_ranks(self, size: int, work: Callable[[Any], Any]) -> list[Any]:
        return Meeting(size).run(work)


def test_what_took_place_is_kept() -> None:
    meeting = Meeting(2)
    meeting.run(lambda comm: (comm.all_reduce(torch.ones(2, 3)), comm.all_gather(torch.ones(5))))
    assert [(held.kind, held.nbytes) for held in meeting.held] == [("all_reduce", 24), ("all_gather", 20)]


@pytest.mark.parametrize(
    ("work", "message"),
    [
        (
            lambda c: c.all_reduce(torch.ones(2 + c.rank)),
            r"rank 0 came to all_reduce of \[2\] .*, rank 1 to .* of \[3\]",
        ),
        (
            lambda c: c.all_reduce(torch.ones(2)) if c.rank else c.all_gather(torch.ones(2)),
            "all_gather of .*all_reduce",
        ),
        (lambda c: c.rank or c.all_reduce(torch.ones(2)), "rank 0 waits in all_reduce of .*, and .* is done"),
    ],
)
def test_ranks_that_miss_each_other_are_told(work: Callable[[Any], Any], message: str) -> None:
    with pytest.raises(MeetingViolation, match=message):
        Meeting(2).run(work)


def test_an_error_of_one_rank_ends_the_others() -> None:
    def work(comm: Any) -> None:
        if comm.rank == 1:
            raise KeyError("mine")
        comm.all_reduce(torch.ones(1))

    with pytest.raises(KeyError, match="mine"):
        Meeting(3).run(work)
