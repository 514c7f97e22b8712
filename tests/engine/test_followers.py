"""Tests of `RankedEngine`, with rank 0 in this process: the exit of a follower process raises `EngineDeadError`."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch

from minisgl.core import EngineDeadError, EngineSpec, Step
from minisgl.engine.followers import Followers, RankedEngine


class BlockedEngine:
    """Stand-in for rank 0's engine whose result never becomes ready, as on a GPU that waits in a collective."""

    spec, eos_ids = EngineSpec(1, 1, 1, 1, 1), frozenset[int]()
    dtype = torch.float32

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.calls: list[str] = []

    def launch(self, step: Any) -> None:
        raise AssertionError("launched although a follower did not get the step")

    def result_ready(self) -> bool:
        return False

    def result(self) -> Any:
        raise AssertionError("on a real device this call would block")

    def abandon(self) -> None:
        self.calls.append("abandoned")

    def close(self) -> None:
        self.calls.append("closed")


@pytest.fixture
def follower() -> Any:
    process = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.wait()


def ranked(engine: BlockedEngine, process: subprocess.Popen[bytes]) -> RankedEngine:
    followers = Followers.__new__(Followers)
    followers._processes = [process]
    return RankedEngine(engine, followers, torch.get_num_threads())  # type: ignore[arg-type]


def test_promise_10_rank_dies_during_result(follower: subprocess.Popen[bytes]) -> None:
    """`result` raises within two seconds if a follower is killed; the engine on a GPU is then abandoned, not closed."""
    blocked = BlockedEngine("cuda")
    engine = ranked(blocked, follower)
    threading.Timer(0.3, follower.kill).start()
    start = time.monotonic()
    with pytest.raises(EngineDeadError, match="rank 1 ended with status -9"):
        engine.result()
    assert 0.2 < time.monotonic() - start < 2
    engine.close()
    assert blocked.calls == ["abandoned"]


def test_promise_10_closed_pipe_counts_as_dead() -> None:
    """A follower that has closed its standard input, but has not exited, counts as failed when a step is launched."""
    program = "import os, time; os.close(0); os.close(1); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process.stdout as closed:
        assert closed.read() == b""
    blocked = BlockedEngine("cuda")
    engine = ranked(blocked, process)
    one, none = np.zeros(1, np.int32), np.empty(0, np.int32)
    step = Step(0, one, one, one + 1, one + 1, 1, 0, one, (none, none, none))
    with pytest.raises(EngineDeadError, match="rank 1 is gone"):
        engine.launch(step)
    engine.close()
    engine.close()
    assert blocked.calls == ["abandoned"]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_close_without_failure(device: str, follower: subprocess.Popen[bytes]) -> None:
    """If no rank has failed, `close` closes rank 0's engine and the follower exits with status 0."""
    blocked = BlockedEngine(device)
    ranked(blocked, follower).close()
    assert blocked.calls == ["closed"]
    assert follower.wait(5) == 0
