"""communicator=auto: peers' memory where GPUs reach it, torch.distributed elsewhere."""

from __future__ import annotations

import pytest
import torch

from minisgl.options.compose import compose
from minisgl.plugin_manager.manager import PluginManager
from minisgl.plugins.communicator.auto import Auto, pick
from minisgl.plugins.communicator.torch import TorchCommunicator

GPU = torch.device("cuda", 0)


def test_on_a_cpu_it_is_torch_and_the_default() -> None:
    manager = PluginManager.load()
    config = compose(manager, []).communicator
    assert isinstance(config, Auto)
    link = manager.build("communicator", config, rank=0, size=1, address="", device=torch.device("cpu"))
    assert isinstance(link, TorchCommunicator)


def test_on_gpus_every_pair_must_reach_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    apart: set[tuple[int, int]] = set()
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: (a, b) not in apart)
    assert pick(1, GPU) == pick(4, GPU) == "nccl"
    apart.add((3, 1))
    assert pick(3, GPU) == "nccl"
    assert pick(4, GPU) == "torch"
