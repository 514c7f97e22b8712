"""communicator=torch over gloo: collectives, several links in one process, real processes, a peer that dies."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest
import torch

from minisgl.config import ConfigError
from minisgl.distributed import Communicator
from minisgl.host import Host
from minisgl.kernel.norm import add_rms_norm
from minisgl.plugins.communicator.torch import Torch, TorchCommunicator
from minisgl.testing.paged import run_ranks
from minisgl.utils.ports import free_port

CPU = torch.device("cpu")


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_collectives(size: int, dtype: torch.dtype) -> None:
    def rank(comm: Communicator) -> None:
        x = (torch.arange(6).view(2, 3) + 10 * comm.rank).to(dtype)
        every = [(torch.arange(6).view(2, 3) + 10 * r).to(dtype) for r in range(size)]
        assert (comm.rank, comm.size) == (comm.rank, size)
        assert torch.equal(comm.all_gather(x), torch.cat(every, dim=-1))
        assert torch.equal(comm.all_gather(x, dim=0), torch.cat(every, dim=0))
        assert torch.equal(comm.all_gather(x.T, dim=0), torch.cat([e.T for e in every], dim=0))
        assert torch.equal(comm.all_reduce(x.clone()), sum(every))
        assert torch.equal(comm.broadcast(x.clone(), src=size - 1), every[-1])
        assert comm.exchange(b"\0from %d" % comm.rank) == [b"\0from %d" % r for r in range(size)]
        assert comm.exchange(b"") == [b""] * size

    run_ranks(size, rank)


def test_all_reduce_norm() -> None:
    x, residual, weight = torch.randn(2, 5, 8), torch.randn(5, 8), torch.rand(8)

    def rank(comm: Communicator) -> None:
        want = add_rms_norm(x.sum(0), residual, weight, 1e-6)
        got = comm.all_reduce_norm(x[comm.rank].clone(), residual.clone(), weight, 1e-6)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b)

    run_ranks(2, rank)


def test_one_rank_sends_nothing_and_needs_no_address() -> None:
    comm = TorchCommunicator(Torch(), 0, 1, "", CPU)
    x = torch.randn(3, 4)
    assert comm.all_reduce(x) is comm.all_gather(x) is comm.broadcast(x) is x
    assert comm.exchange(b"x") == [b"x"]
    with comm.capturing():
        pass
    comm.close()
    comm.close(abort=True)


@pytest.mark.parametrize("address", ["", "localhost", "localhost:port"])
def test_an_address_is_needed_with_several(address: str) -> None:
    with pytest.raises(ConfigError, match="needs rank 0's address as host:port"):
        TorchCommunicator(Torch(), 0, 2, address, CPU)


def test_two_links_live_in_one_process_without_a_default_group() -> None:
    """Two engines side by side: their collectives don't meet, and torch.distributed stays uninitialised."""
    barrier = threading.Barrier(2)

    def link(offset: int) -> list[list[float]]:
        def rank(comm: Communicator) -> list[float]:
            sums = []
            for i in range(20):
                if comm.rank == 0:
                    barrier.wait(30)  # both links are in a collective at the same time
                sums.append(float(comm.all_reduce(torch.tensor([offset + i + comm.rank * 100.0]))))
            return sums

        return run_ranks(2, rank)

    results: dict[int, list[list[float]]] = {}
    threads = [threading.Thread(target=lambda o=o: results.update({o: link(o)})) for o in (0, 5000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for offset in (0, 5000):
        assert results[offset] == [[2.0 * (offset + i) + 100 for i in range(20)]] * 2
    assert not torch.distributed.is_initialized()


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
