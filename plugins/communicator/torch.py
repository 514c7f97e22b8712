"""``communicator=torch``: collectives through torch.distributed, gloo between CPUs and NCCL between GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from minisgl.distributed import Communicator
from minisgl.hooks import hookimpl
from minisgl.plugins.communicator.group import GroupCommunicator


@dataclass
class Torch:
    """torch.distributed: gloo between CPUs, NCCL between GPUs."""

    timeout: float = 300.0
    """Time limit in seconds of a collective, and of the wait for the other ranks at start."""

    def build(self, rank: int, size: int, address: str, device: torch.device) -> Communicator:
        return TorchCommunicator(self, rank, size, address, device)


class TorchCommunicator(GroupCommunicator):
    """`GroupCommunicator`, without changes."""

    def __init__(self, config: Torch, rank: int, size: int, address: str, device: torch.device):
        super().__init__(config.timeout, rank, size, address, device)


@hookimpl
def minisgl_configs() -> Any:
    """Register the options of this plugin."""
    yield "communicator", "torch", Torch
