"""run_ranks: a rank that is slow to link is no deadlock, one that waits for ever is, and a failure is the caller's."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from minisgl.distributed import Communicator
from minisgl.plugins.communicator.torch import Torch, TorchCommunicator
from minisgl.testing.ranks import Deadlock, run_ranks


def link(rank: int, size: int, address: str) -> TorchCommunicator:
    return TorchCommunicator(Torch(timeout=60), rank, size, address, torch.device("cpu"))


def total(comm: Communicator) -> float:
    return float(comm.all_reduce(torch.ones(2)).sum())


def test_how_long_ranks_take_to_link_does_not_count() -> None:
    def make(rank: int, size: int, address: str) -> TorchCommunicator:
        time.sleep(1.5 * rank)
        return link(rank, size, address)

    assert run_ranks(2, total, make=make, limit=1.0) == [4.0, 4.0]


def test_a_rank_that_never_comes_is_a_deadlock_and_the_others_go_home() -> None:
    before, begun = set(threading.enumerate()), time.monotonic()
    with pytest.raises(Deadlock, match=r"rank 0 at .*; rank 1 at "):
        run_ranks(3, lambda comm: total(comm) if comm.rank < 2 else 0.0, make=link, limit=1.0)
    assert time.monotonic() - begun < 30
    assert not [one for one in set(threading.enumerate()) - before if one.name.startswith("rank-")]


def test_what_one_rank_raises_is_raised() -> None:
    def work(comm: Communicator) -> float:
        if comm.rank == 1:
            raise LookupError("lost")
        return total(comm)

    with pytest.raises(LookupError, match="lost"):
        run_ranks(2, work, make=link, limit=30.0)
