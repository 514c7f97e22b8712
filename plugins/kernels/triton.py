"""``kernels=triton``: Triton kernels on a GPU, also to choose tokens, and fewer launches for a decoder layer."""

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
class TritonKernels:
    """Triton kernels, on a GPU."""

    def build(self, device: torch.device) -> Kernels:
        if device.type != "cuda":
            raise ConfigError(f"these kernels compute on a GPU, not on a {device.type.upper()}: use kernels=cpp.")
        from minisgl.plugins.kernels.converted.parts import ConvertedKernels

        return ConvertedKernels()


@hookimpl
def minisgl_configs() -> Iterable[tuple[str, str, type]]:
    """Register the options of this plugin."""
    yield "kernels", "triton", TritonKernels
