"""What communicator=nccl decides without a GPU. What it does on GPUs is tested in tests/gpu."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch

from minisgl.config import ConfigError
from minisgl.distributed.shared import CountedStore
from minisgl.plugin_manager.manager import PluginManager
from minisgl.plugins.communicator.nccl import MIB, Nccl, NcclCommunicator, _limits, _suits_two_shot

CPU = torch.device("cpu")


def test_one_rank_needs_no_gpu_and_sends_nothing() -> None:
    manager = PluginManager.load()
    link = manager.build("communicator", manager.make("communicator", "nccl"), rank=0, size=1, address="", device=CPU)
    assert isinstance(link, NcclCommunicator)
    x = torch.randn(2, 16)
    assert link.all_reduce(x) is x
    assert torch.equal(link.all_reduce_norm(x, torch.zeros_like(x), torch.ones(16), 1e-6)[1], x)
    link.close()


def test_on_a_cpu_it_says_what_to_use() -> None:
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
def test_up_to_which_size_a_sum_takes_which_road(config: Nccl, size: int, limits: tuple[int, int]) -> None:
    assert _limits(config, size) == limits


def test_what_torchs_two_shot_kernel_takes() -> None:
    x = torch.empty(4, 64)
    assert _suits_two_shot(x, 1024)
    assert not _suits_two_shot(x, 1023)
    for wrong in (x.half(), x.double(), x.T, x[:0], torch.empty(5), x.view(-1)[1:65]):
        assert not _suits_two_shot(wrong, 4096), wrong.shape


def test_ranks_meet_though_their_processes_have_counted_differently() -> None:
    """torch's symmetric memory numbers its exchanges by process: here the 7th of one meets the 1st of another."""
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
