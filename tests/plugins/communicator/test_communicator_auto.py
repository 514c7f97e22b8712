"""``communicator=auto``: nccl if all GPUs can access each other's memory, else torch."""

from __future__ import annotations

import pytest
import torch

from minisgl.options.compose import compose
from minisgl.plugin_manager.manager import PluginManager
from minisgl.plugins.communicator.auto import Auto, pick
from minisgl.plugins.communicator.torch import TorchCommunicator

GPU = torch.device("cuda", 0)


def test_default_on_a_cpu() -> None:
    """``auto`` is the default, and builds ``torch`` on a CPU."""
    manager = PluginManager.load()
    config = compose(manager, []).communicator
    assert isinstance(config, Auto)
    link = manager.build("communicator", config, rank=0, size=1, address="", device=torch.device("cpu"))
    assert isinstance(link, TorchCommunicator)


def test_peer_access_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """One pair of GPUs without peer access is enough to select ``torch``."""
    no_access: set[tuple[int, int]] = set()
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: (a, b) not in no_access)
    assert pick(1, 1, GPU) == pick(4, 4, GPU) == "nccl"
    no_access.add((3, 1))
    assert pick(3, 3, GPU) == "nccl"
    assert pick(4, 4, GPU) == "torch"


def test_ranks_on_several_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs of several hosts share no memory: ``auto`` selects ``torch``, without a look at GPUs that may not exist."""
    monkeypatch.delattr(torch.cuda, "can_device_access_peer")
    assert pick(4, 2, GPU) == "torch"
