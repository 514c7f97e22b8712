"""``communicator=auto``: the fastest communicator that works between the given ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import permutations

import torch

from minisgl.distributed import Communicator
from minisgl.hooks import hookimpl


@dataclass
class Auto:
    """``nccl`` between GPUs of one host that can access each other's memory; else ``torch``, as on a CPU."""

    def build(
        self, size: int, local_size: int, device: torch.device, build_other: Callable[[str], Communicator]
    ) -> Communicator:
        """Build the communicator ``nccl`` or ``torch``, by device."""
        return build_other(pick(size, local_size, device))


def pick(size: int, local_size: int, device: torch.device) -> str:
    """Return the communicator's name for ``size`` ranks, ``local_size`` of them on this host.

    If all of them are, rank r uses GPU r.
    """
    if device.type != "cuda" or local_size < size:
        return "torch"
    peer_access = all(torch.cuda.can_device_access_peer(a, b) for a, b in permutations(range(size), 2))
    return "nccl" if peer_access else "torch"


@hookimpl
def minisgl_configs() -> Iterable[tuple[str, str, type]]:
    """Register the options of this plugin."""
    yield "communicator", "auto", Auto
