"""``moe=auto``: grouped Triton kernels on a GPU; a loop over experts on a CPU or without Triton."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from minisgl.hooks import hookimpl

if TYPE_CHECKING:
    from minisgl.plugins.moe import MoeBackend


@dataclass
class Auto:
    """``triton`` on a GPU if Triton is installed, else ``torch``."""

    def build(self, device: torch.device, build_other: Callable[[str], MoeBackend]) -> MoeBackend:
        """Build the backend ``triton`` or ``torch``, by device."""
        fused = device.type == "cuda" and importlib.util.find_spec("triton") is not None
        backend: Any = build_other("triton" if fused else "torch")
        if not fused:
            with contextlib.suppress(ModuleNotFoundError):  # without plugins/kernels, torch computes the activation
                from minisgl.plugins.kernels.ops.activation import activation

                backend.find_activation = activation
        return backend  # type: ignore[no-any-return]


@hookimpl
def minisgl_configs() -> Iterable[tuple[str, str, type]]:
    """Register the options of this plugin."""
    yield "moe", "auto", Auto
