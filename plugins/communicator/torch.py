"""`communicator=torch`: collectives through torch.distributed, gloo between CPUs and NCCL between GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from minisgl.distributed import Communicator
from minisgl.distributed.group import GroupCommunicator
from minisgl.hooks import hookimpl


@dataclass
class Torch:
    """torch.distributed: gloo on a CPU, NCCL on GPUs."""

    timeout: float = 300.0
    """Seconds after which a collective, or the wait for the other ranks at start, gives up."""


class TorchCommunicator(GroupCommunicator):
    """The group as it is."""

    def __init__(self, config: Torch, rank: int, size: int, address: str, device: torch.device):
        super().__init__(config.timeout, rank, size, address, device)


@hookimpl
def minisgl_configs() -> Any:
    yield "communicator", "torch", Torch


@hookimpl
def minisgl_communicator(config: Any, rank: int, size: int, address: str, device: torch.device) -> Communicator | None:
    return TorchCommunicator(config, rank, size, address, device) if isinstance(config, Torch) else None
