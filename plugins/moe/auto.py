"""``moe=auto``: grouped Triton kernels on a GPU; a loop over experts on a CPU or without Triton."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from minisgl.hooks import hookimpl

if TYPE_CHECKING:
    from minisgl.moe import MoeBackend


@dataclass
class Auto:
    """``triton`` on a GPU if Triton is installed, else ``torch``."""

    def build(self, device: torch.device, build_other: Callable[[str], MoeBackend]) -> MoeBackend:
        """Build the backend ``triton`` or ``torch``, by device."""
        fused = device.type == "cuda" and importlib.util.find_spec("triton") is not None
        return build_other("triton" if fused else "torch")


@hookimpl
def minisgl_configs() -> Iterable[tuple[str, str, type]]:
    """Register the options of this plugin."""
    yield "moe", "auto", Auto
