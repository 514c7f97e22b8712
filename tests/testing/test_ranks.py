"""Tests of `run_ranks`: the time limit, deadlocks, and the errors of ranks."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from minisgl.distributed import Communicator
from minisgl.plugins.communicator.torch import Torch, TorchCommunicator
from minisgl.testing.ranks import Deadlock, run_ranks
from minisgl.testing.serving import patient_timeout


def link(rank: int, size: int, address: str) -> TorchCommunicator:
    return TorchCommunicator(Torch(timeout=60), rank, size, address, torch.device("cpu"))


def total(comm: Communicator) -> float:
    return float(comm.all_reduce(torch.ones(2)).sum())


def test_slow_link() -> None:
    """The time that ranks need to link does not count towards the limit."""

    def make(rank: int, size: int, address: str) -> TorchCommunicator:
        time.sleep(1.5 * rank)
        return link(rank, size, address)

    assert run_ranks(2, total, make=make, limit=1.0) == [4.0, 4.0]


def test_deadlock() -> None:
    """If a rank does not call a collective, `Deadlock` names the waiting ranks, and their threads end."""
    before, begun = set(threading.enumerate()), time.monotonic()
    with pytest.raises(Deadlock, match=r"rank 0 at .*; rank 1 at "):
        run_ranks(3, lambda comm: total(comm) if comm.rank < 2 else 0.0, make=link, limit=1.0)
    assert time.monotonic() - begun < patient_timeout(30)
    assert not [thread for thread in set(threading.enumerate()) - before if thread.name.startswith("rank-")]


def test_error_of_a_rank() -> None:
    """The error of a rank is raised to the caller."""

    def work(comm: Communicator) -> float:
        if comm.rank == 1:
            raise LookupError("lost")
        return total(comm)

    with pytest.raises(LookupError, match="lost"):
        run_ranks(2, work, make=link, limit=30.0)
