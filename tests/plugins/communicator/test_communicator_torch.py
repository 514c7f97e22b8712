"""communicator=torch over gloo: the kit, real processes, a peer that dies."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
import torch

from minisgl.config import ConfigError
from minisgl.distributed import Communicator
from minisgl.host import Host
from minisgl.plugins.communicator.torch import Torch, TorchCommunicator
from minisgl.testing.communicator import CommunicatorConformance
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


def test_it_is_a_plugin() -> None:
    host = Host.load()
    config = host.make("communicator", "torch")
    comm = host.build("communicator", config, rank=0, size=1, address="", device=CPU)
    assert isinstance(comm, TorchCommunicator)
