"""``communicator=ring``: the conformance kit, and the bytes sent: 2(n-1)/n of the message by each of n ranks."""

from __future__ import annotations

import pytest
import torch

from minisgl import LLM, SamplingParams
from minisgl.config import ConfigError
from minisgl.distributed import Communicator
from minisgl.plugin_manager.manager import PluginManager
from minisgl.plugins.communicator.ring import Ring, RingCommunicator
from minisgl.testing.communicator import CommunicatorConformance
from minisgl.testing.ranks import Deadlock, run_ranks

CPU = torch.device("cpu")


class TestRing(CommunicatorConformance):
    sizes = (2, 3, 5)

    def make(self, rank: int, size: int, address: str) -> Communicator:
        """Build the communicator to test."""
        return RingCommunicator(Ring(timeout=30), rank, size, address, CPU)


def ring(rank: int, size: int, address: str) -> RingCommunicator:
    """Build a ring communicator with a short timeout."""
    return RingCommunicator(Ring(timeout=30), rank, size, address, CPU)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_sent_bytes(size: int) -> None:
    """Each rank sends 2(n-1)/n of the message."""
    length = 60

    def work(comm: Communicator) -> int:
        assert isinstance(comm, RingCommunicator)
        comm.all_reduce(torch.ones(length))
        return comm.sent_bytes

    assert run_ranks(size, work, make=ring) == [2 * (size - 1) * length // size * 4] * size


def test_indivisible_length() -> None:
    """8 elements over 3 ranks: the longer chunks carry the remainder."""

    def work(comm: Communicator) -> int:
        comm.all_reduce(torch.ones(8))
        assert isinstance(comm, RingCommunicator)
        return comm.sent_bytes // 4

    # Chunks of 3, 3 and 2: a rank does not send its own chunk while adding, nor its right neighbour's while copying.
    assert run_ranks(3, work, make=ring) == [16 - 3 - 3, 16 - 3 - 2, 16 - 2 - 3]


def test_deadlock_is_reported() -> None:
    """If all ranks wait for their sends before they receive, `run_ranks` reports where each rank waits."""

    class Deadlocking(RingCommunicator):
        def swap(self, outgoing: torch.Tensor, incoming: torch.Tensor) -> None:
            self.send(outgoing, (self.rank + 1) % self.size).wait()
            self.receive(incoming, (self.rank - 1) % self.size).wait()

    def make(rank: int, size: int, address: str) -> Deadlocking:
        return Deadlocking(Ring(timeout=30), rank, size, address, CPU)

    with pytest.raises(Deadlock, match=r"rank 0 at test_ring\.py") as caught:
        run_ranks(3, lambda comm: comm.all_reduce(torch.ones(3)), make=make, limit=1.0)
    assert set(caught.value.locations) == {0, 1, 2}


def test_two_ranks_in_the_engine() -> None:
    """tutor on two ranks with the ring gives the same tokens as on one rank."""
    prompts, params = ["What is 17 + 25?", "What is a radix cache?"], SamplingParams(max_tokens=8, temperature=0.0)
    with LLM("tutor", overrides=["device=cpu"]) as llm:
        want = [output.token_ids for output in llm.generate(prompts, params)]
    with LLM("tutor", overrides=["device=cpu", "tp=2", "communicator=ring", "architecture=Qwen3Plain"]) as llm:
        assert [output.token_ids for output in llm.generate(prompts, params)] == want


def test_gpus_are_refused() -> None:
    with pytest.raises(ConfigError, match="this ring connects CPUs; between GPUs use communicator=torch"):
        RingCommunicator(Ring(), 0, 2, "localhost:1", torch.device("cuda"))


def test_it_is_a_plugin() -> None:
    manager = PluginManager.load()
    comm = manager.build("communicator", manager.make("communicator", "ring"), rank=0, size=1, address="", device=CPU)
    assert isinstance(comm, RingCommunicator)
