"""communicator=torch over gloo: the kit, real processes, a peer that dies."""

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

from minisgl.config import ConfigError
from minisgl.distributed import Communicator
from minisgl.plugin_manager.manager import PluginManager
from minisgl.plugins.communicator.torch import Torch, TorchCommunicator
from minisgl.testing.communicator import CommunicatorConformance
from minisgl.testing.ranks import run_ranks
from minisgl.utils.ports import free_port

CPU = torch.device("cpu")


class TestTorch(CommunicatorConformance):
    def make(self, rank: int, size: int, address: str) -> Communicator:
        return TorchCommunicator(Torch(timeout=60), rank, size, address, CPU)


@pytest.mark.parametrize("address", ["", "localhost", "localhost:port"])
def test_an_address_is_needed_with_several(address: str) -> None:
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
    command = [sys.executable, "-c", CHILD, str(rank), address, word]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_processes_meet_at_the_address() -> None:
    address = f"127.0.0.1:{free_port()}"
    children = [start(rank, address, "") for rank in (1, 0)]
    assert [child.communicate(timeout=60)[0] for child in children] == ["3.0\n", "3.0\n"]
    assert [child.returncode for child in children] == [0, 0]


def test_a_peer_that_dies_is_an_error_and_not_a_hang() -> None:
    address = f"127.0.0.1:{free_port()}"
    child = start(1, address, "die")
    comm = TorchCommunicator(Torch(timeout=60), 0, 2, address, CPU)
    comm.all_reduce(torch.ones(1))
    assert child.wait(60) == 3
    begin = time.monotonic()
    with pytest.raises(RuntimeError):
        comm.all_reduce(torch.ones(1))
    comm.close(abort=True)
    assert time.monotonic() - begin < 10
    assert child.stdout is not None
    child.stdout.close()


@pytest.mark.parametrize("late", [0, 1, 2])
def test_no_rank_goes_on_before_all_are_connected(late: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """To one that still connects, one that is done with its group by then would look dead."""
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
def test_promise_10_a_rank_that_fails_to_connect_is_an_error_on_all(
    broken: int, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the others still wait for it then, or are connected to it already."""

    def connect(store: Store, rank: int, size: int, limit: timedelta) -> ProcessGroupGloo:
        limit = timedelta(seconds=2)
        if rank != broken:
            return ProcessGroupGloo(store, rank, size, limit)
        if when == "after":
            ProcessGroupGloo(store, rank, size, limit)  # and gone again, with its connections
        raise RuntimeError("the cable is cut")

    store = HashStore()  # in memory: over TCP, each rank may wait 5 s for a name server, on some machines
    monkeypatch.setattr(torch.distributed, "TCPStore", lambda *_, **__: store)
    monkeypatch.setattr(torch.distributed, "ProcessGroupGloo", connect)
    make = partial(TorchCommunicator, Torch(timeout=60), size=3, address=f"127.0.0.1:{free_port()}", device=CPU)
    begin = time.monotonic()
    with ThreadPoolExecutor(3) as ranks:
        errors = [str(rank.exception()) for rank in [ranks.submit(make, rank=rank) for rank in range(3)]]
    assert time.monotonic() - begin < 15  # gloo itself waits up to five times its limit for a rank that it knows
    assert all(f"Rank {rank} of 3 could not connect" in error for rank, error in enumerate(errors))
    assert "the cable is cut" in errors[broken]


def test_it_is_a_plugin() -> None:
    manager = PluginManager.load()
    config = manager.make("communicator", "torch")
    comm = manager.build("communicator", config, rank=0, size=1, address="", device=CPU)
    assert isinstance(comm, TorchCommunicator)
