"""Tests of `ChildRanks`, with rank 0 in this process: the exit of another rank's process raises `EngineDeadError`."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from minisgl.core import EngineDeadError, EngineSpec, Step
from minisgl.engine.engine import TorchEngine, _LaunchedStep
from minisgl.plugins.ranks.children import ChildRanks
from minisgl.testing.serving import patient_timeout


class BlockedRunner:
    """Stand-in for rank 0's runner."""

    spec, rank, size, model, attention = EngineSpec(1, 1, 1, 1, 1), 0, 2, None, None

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.ctx: Any = SimpleNamespace(comm=self, dtype=torch.float32, pool=None)

    def begin(self, step: Any) -> None:
        raise AssertionError("launched although a rank did not get the step")

    def close(self) -> None:
        pass


class BlockedDownload:
    """Stand-in for a result that never becomes ready, as on a GPU that waits in a collective."""

    def ready(self) -> bool:
        return False

    def arrays(self) -> Any:
        raise AssertionError("on a real device this call would block")


class BlockedEngine(TorchEngine):
    """Rank 0's engine, with a step in flight whose result never becomes ready. It records how it ends."""

    def __init__(self, device: str, process: subprocess.Popen[bytes]) -> None:
        runner: Any = BlockedRunner(device)
        super().__init__(runner, runner, runner, frozenset())
        self.calls: list[str] = []
        self._in_flight.append(_LaunchedStep(one_step(), (), BlockedDownload()))  # type: ignore[arg-type]
        ranks = ChildRanks.__new__(ChildRanks)
        ranks._processes, ranks._threads = [process], torch.get_num_threads()
        self.peers = ranks

    def _abandon(self) -> None:
        self.calls.append("abandoned")

    def _release(self) -> None:
        self.calls.append("closed")


def one_step() -> Step:
    one, none = np.zeros(1, np.int32), np.empty(0, np.int32)
    return Step(0, one, one, one + 1, one + 1, 1, 0, one, (none, none, none))


@pytest.fixture
def follower() -> Any:
    process = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.wait()


def test_promise_10_rank_dies_during_result(follower: subprocess.Popen[bytes]) -> None:
    """`result` raises within two seconds if a follower is killed; the engine on a GPU is then abandoned, not closed."""
    engine = BlockedEngine("cuda", follower)
    threading.Timer(0.3, follower.kill).start()
    start = time.monotonic()
    with pytest.raises(EngineDeadError, match="rank 1 ended with status -9"):
        engine.result()
    assert 0.2 < time.monotonic() - start < patient_timeout(2)
    engine.close()
    assert engine.calls == ["abandoned"]


def test_promise_10_closed_pipe_counts_as_dead() -> None:
    """A follower that has closed its standard input, but has not exited, counts as failed when a step is launched."""
    program = "import os, time; os.close(0); os.close(1); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process.stdout as closed:
        assert closed.read() == b""
    engine = BlockedEngine("cuda", process)
    with pytest.raises(EngineDeadError, match="rank 1 is gone"):
        engine.launch(one_step())
    engine.close()
    engine.close()
    assert engine.calls == ["abandoned"]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_close_without_failure(device: str, follower: subprocess.Popen[bytes]) -> None:
    """If no rank has failed, `close` closes rank 0's engine and the follower exits with status 0."""
    engine = BlockedEngine(device, follower)
    engine.close()
    assert engine.calls == ["closed"]
    assert follower.wait(patient_timeout(5)) == 0
