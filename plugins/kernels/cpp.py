"""``kernels=cpp``: C++ kernels, oneDNN and huge pages on a CPU. Without a compiler, torch replaces the C++."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from minisgl.config import ConfigError
from minisgl.hooks import hookimpl

if TYPE_CHECKING:
    import torch

    from minisgl.models.converter import Kernels


@dataclass
class CppKernels:
    """C++ kernels, oneDNN's products and huge pages, on a CPU."""

    def build(self, device: torch.device) -> Kernels:
        if device.type != "cpu":
            raise ConfigError(f"these kernels compute on a CPU, not on {device.type}: use kernels=triton.")
        from minisgl.plugins.kernels.converted.parts import ConvertedKernels

        return ConvertedKernels()


@hookimpl
def minisgl_configs() -> Iterable[tuple[str, str, type]]:
    """Register the options of this plugin."""
    yield "kernels", "cpp", CppKernels
