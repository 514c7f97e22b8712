"""The parts of ``communicator=nccl`` that need no GPU. tests/gpu has the tests on GPUs."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch

from minisgl.config import ConfigError
from minisgl.plugin_manager.manager import PluginManager
from minisgl.plugins.communicator.nccl import MIB, Nccl, NcclCommunicator, _limits, _suits_two_shot
from minisgl.plugins.communicator.shared import CountedStore

CPU = torch.device("cpu")


def test_one_rank() -> None:
    """With one rank no GPU is needed and nothing is sent."""
    manager = PluginManager.load()
    link = manager.build("communicator", manager.make("communicator", "nccl"), rank=0, size=1, address="", device=CPU)
    assert isinstance(link, NcclCommunicator)
    x = torch.randn(2, 16)
    assert link.all_reduce(x) is x
    assert torch.equal(link.all_reduce_norm(x, torch.zeros_like(x), torch.ones(16), 1e-6)[1], x)
    link.close()


def test_cpu_is_refused() -> None:
    with pytest.raises(ConfigError, match="on a CPU use communicator=torch"):
        NcclCommunicator(Nccl(), 0, 2, "127.0.0.1:1", CPU)


@pytest.mark.parametrize(
    ("config", "size", "limits"),
    [
        (Nccl(), 2, (10 * MIB, 16 * MIB)),
        (Nccl(), 4, (4 * MIB // 3 // 16 * 16, 16 * MIB)),
        (Nccl(), 3, (2 * MIB, 0)),
        (Nccl(one_shot_bytes=0, two_shot_bytes=100), 2, (0, 96)),
        (Nccl(one_shot_bytes=1000, two_shot_bytes=0), 8, (992, 0)),
    ],
)
def test_size_limits(config: Nccl, size: int, limits: tuple[int, int]) -> None:
    """The largest messages, in bytes, of the one-shot and the two-shot algorithm."""
    assert _limits(config, size) == limits


def test_two_shot_inputs() -> None:
    """torch's two-shot kernel gets contiguous, aligned tensors of supported dtypes and sizes only."""
    x = torch.empty(4, 64)
    assert _suits_two_shot(x, 1024)
    assert not _suits_two_shot(x, 1023)
    for wrong in (x.half(), x.double(), x.T, x[:0], torch.empty(5), x.view(-1)[1:65]):
        assert not _suits_two_shot(wrong, 4096), wrong.shape


def test_counted_store() -> None:
    """Two ranks exchange handles although their processes have counted different numbers of exchanges before.

    torch's symmetric memory numbers its exchanges per process: here one rank starts at 7, the other at 0.
    """
    store = torch.distributed.HashStore()
    counted = CountedStore(store), CountedStore(store)
    old, new = (torch.distributed.PrefixStore("group", one) for one in counted)
    for i in range(3):
        old.set(f"Memory/{7 + i}/0", b"old %d" % i)
        new.set(f"Memory/{i}/1", b"new %d" % i)
        old.wait([f"Memory/{7 + i}/1"], timedelta(seconds=1))
        new.wait([f"Memory/{i}/0"])
        assert old.get(f"Memory/{7 + i}/1") == b"new %d" % i
        assert new.get(f"Memory/{i}/0") == b"old %d" % i
