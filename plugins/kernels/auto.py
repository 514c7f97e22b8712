"""``kernels=auto``, the default: ``triton`` on a GPU, ``cpp`` on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from minisgl.hooks import hookimpl
from minisgl.plugins.kernels.openmp import warn_if_threads_spin

if TYPE_CHECKING:
    import torch

    from minisgl.models.converter import Kernels


@dataclass
class AutoKernels:
    """``triton`` on a GPU, ``cpp`` on a CPU."""

    def build(self, device: torch.device, build_other: Callable[[str], Kernels]) -> Kernels:
        if device.type == "cpu":
            warn_if_threads_spin()
        return build_other("triton" if device.type == "cuda" else "cpp")


@hookimpl
def minisgl_configs() -> Iterable[tuple[str, str, type]]:
    """Register the options of this plugin."""
    yield "kernels", "auto", AutoKernels
