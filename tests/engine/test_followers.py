"""Rank 0 in this process and a follower beside it: whoever waits for a device learns that a rank is gone."""

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


class Waiting:
    """Rank 0's engine, whose device waits for another rank, as a GPU does inside a collective."""

    spec, eos_ids = EngineSpec(1, 1, 1, 1, 1), frozenset[int]()
    dtype = torch.float32

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.ended: list[str] = []

    def launch(self, step: Any) -> None:
        raise AssertionError("a rank that has not got the step is not waited for")

    def arrived(self) -> bool:
        return False

    def result(self) -> Any:
        raise AssertionError("nobody comes back from this")

    def abandon(self) -> None:
        self.ended.append("abandoned")

    def close(self) -> None:
        self.ended.append("closed")


@pytest.fixture
def follower() -> Any:
    process = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.wait()


def ranked(engine: Waiting, process: subprocess.Popen[bytes]) -> RankedEngine:
    followers = Followers.__new__(Followers)
    followers._processes = [process]
    return RankedEngine(engine, followers, torch.get_num_threads())  # type: ignore[arg-type]


def test_promise_10_a_rank_that_dies_while_its_result_is_due(follower: subprocess.Popen[bytes]) -> None:
    device = Waiting("cuda")
    engine = ranked(device, follower)
    threading.Timer(0.3, follower.kill).start()
    start = time.monotonic()
    with pytest.raises(EngineDeadError, match="rank 1 ended with status -9"):
        engine.result()
    assert 0.2 < time.monotonic() - start < 2
    engine.close()
    assert device.ended == ["abandoned"]


def test_promise_10_a_rank_that_can_not_be_reached_counts_as_dead() -> None:
    """Its end of the pipe is gone, and it has not ended yet: so it is in the first moments of its death."""
    program = "import os, time; os.close(0); os.close(1); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process.stdout as closed:
        assert closed.read() == b""
    device = Waiting("cuda")
    engine = ranked(device, process)
    one, none = np.zeros(1, np.int32), np.empty(0, np.int32)
    step = Step(0, one, one, one + 1, 1, np.ones(1, bool), one, (none, none, none))
    with pytest.raises(EngineDeadError, match="rank 1 is gone"):
        engine.launch(step)
    engine.close()
    engine.close()
    assert device.ended == ["abandoned"]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_an_engine_whose_ranks_live_is_closed(device: str, follower: subprocess.Popen[bytes]) -> None:
    waiting = Waiting(device)
    ranked(waiting, follower).close()
    assert waiting.ended == ["closed"]
    assert follower.wait(5) == 0
