"""``communicator=torch`` over gloo: the conformance kit, real processes, and peers that fail."""

from __future__ import annotations

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial

import pytest
import torch
from torch.distributed import HashStore, ProcessGroupGloo, Store

from minisgl.cluster.process import free_port
from minisgl.config import ConfigError
from minisgl.distributed import Communicator
from minisgl.plugin_manager.manager import PluginManager
from minisgl.plugins.communicator.torch import Torch, TorchCommunicator
from minisgl.testing.communicator import CommunicatorConformance
from minisgl.testing.ranks import run_ranks
from minisgl.testing.serving import patient_timeout

CPU = torch.device("cpu")


class TestTorch(CommunicatorConformance):
    def make(self, rank: int, size: int, address: str) -> Communicator:
        """Build the communicator to test."""
        return TorchCommunicator(Torch(timeout=60), rank, size, address, CPU)


@pytest.mark.parametrize("address", ["", "localhost", "localhost:port"])
def test_wrong_address(address: str) -> None:
    with pytest.raises(ConfigError, match="needs rank 0's address as host:port"):
        TorchCommunicator(Torch(), 0, 2, address, CPU)


CHILD = """
import sys, torch
from minisgl.plugins.communicator.torch import Torch, TorchCommunicator
rank, address, word = int(sys.argv[1]), sys.argv[2], sys.argv[3]
comm = TorchCommunicator(Torch(timeout=60), rank, 2, address, torch.device("cpu"))
print(float(comm.all_reduce(torch.tensor([rank + 1.0]))), flush=True)
if word == "die":
    import os
    os._exit(3)
comm.close()
"""


def start(rank: int, address: str, word: str) -> subprocess.Popen[str]:
    """Start the script `CHILD`; with the word "die" the process exits with status 3 without closing."""
    command = [sys.executable, "-c", CHILD, str(rank), address, word]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_two_processes() -> None:
    address = f"127.0.0.1:{free_port()}"
    children = [start(rank, address, "") for rank in (1, 0)]
    assert [child.communicate(timeout=300)[0] for child in children] == ["3.0\n", "3.0\n"]
    assert [child.returncode for child in children] == [0, 0]


def test_dead_peer() -> None:
    """A collective with a dead peer raises RuntimeError within seconds instead of blocking."""
    address = f"127.0.0.1:{free_port()}"
    child = start(1, address, "die")
    comm = TorchCommunicator(Torch(timeout=60), 0, 2, address, CPU)
    comm.all_reduce(torch.ones(1))
    assert child.wait(60) == 3
    begin = time.monotonic()
    with pytest.raises(RuntimeError):
        comm.all_reduce(torch.ones(1))
    comm.close(abort=True)
    assert time.monotonic() - begin < patient_timeout(10)
    assert child.stdout is not None
    child.stdout.close()


@pytest.mark.parametrize("late", [0, 1, 2])
def test_all_ranks_wait_until_all_are_connected(late: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No rank returns early: if it then closed its group, a rank that is still connecting would take it for dead."""
    connected: list[int] = []

    def connect(store: Store, rank: int, size: int, limit: timedelta) -> ProcessGroupGloo:
        group = ProcessGroupGloo(store, rank, size, limit)
        time.sleep(0.3 * (rank == late))
        connected.append(rank)
        return group

    monkeypatch.setattr(torch.distributed, "ProcessGroupGloo", connect)
    assert run_ranks(3, lambda comm: sorted(connected), make=TestTorch().make) == [[0, 1, 2]] * 3


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("broken", [0, 1])
def test_promise_10_connection_failure(broken: int, when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a rank fails to connect, all ranks raise an error, also those that were already connected to it."""

    def connect(store: Store, rank: int, size: int, limit: timedelta) -> ProcessGroupGloo:
        limit = timedelta(seconds=2)
        if rank != broken:
            return ProcessGroupGloo(store, rank, size, limit)
        if when == "after":
            ProcessGroupGloo(store, rank, size, limit)  # connect, then drop the group and its connections
        raise RuntimeError("the cable is cut")

    store = HashStore()  # in memory: on some machines a TCPStore waits 5 s for a name server
    monkeypatch.setattr(torch.distributed, "TCPStore", lambda *_, **__: store)
    monkeypatch.setattr(torch.distributed, "ProcessGroupGloo", connect)
    make = partial(TorchCommunicator, Torch(timeout=60), size=3, address=f"127.0.0.1:{free_port()}", device=CPU)
    begin = time.monotonic()
    with ThreadPoolExecutor(3) as ranks:
        errors = [str(rank.exception()) for rank in [ranks.submit(make, rank=rank) for rank in range(3)]]
    assert time.monotonic() - begin < patient_timeout(
        15
    )  # gloo waits up to five times its limit for a rank that had connected
    assert all(f"Rank {rank} of 3 could not connect" in error for rank, error in enumerate(errors))
    assert "the cable is cut" in errors[broken]


def test_it_is_a_plugin() -> None:
    manager = PluginManager.load()
    config = manager.make("communicator", "torch")
    comm = manager.build("communicator", config, rank=0, size=1, address="", device=CPU)
    assert isinstance(comm, TorchCommunicator)
