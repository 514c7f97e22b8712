"""`communicator=auto`: what is fastest between the ranks there are."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import torch

from minisgl.distributed import Communicator
from minisgl.hooks import hookimpl


@dataclass
class Auto:
    """``nccl`` between GPUs that reach each other's memory; ``torch`` otherwise, and on a CPU."""


def pick(size: int, device: torch.device) -> str:
    """The communicator's name for ``size`` ranks, of which rank r computes on GPU r."""
    if device.type != "cuda":
        return "torch"
    reach = all(torch.cuda.can_device_access_peer(a, b) for a, b in permutations(range(size), 2))
    return "nccl" if reach else "torch"


@hookimpl
def minisgl_configs() -> Iterable[tuple[str, str, type]]:
    yield "communicator", "auto", Auto


@hookimpl
def minisgl_communicator(
    config: Any, size: int, device: torch.device, build: Callable[[str], Communicator]
) -> Communicator | None:
    return build(pick(size, device)) if isinstance(config, Auto) else None
