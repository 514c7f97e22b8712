"""``kernels=torch``: every layer computes with torch's own functions, as the core's code says. Best for reading."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from minisgl.hooks import hookimpl

if TYPE_CHECKING:
    from minisgl.models.converter import Kernels


@dataclass
class TorchKernels:
    """torch's own functions, as the core's code says."""

    def build(self) -> Kernels:
        from minisgl.models.converter import Kernels

        return Kernels()


@hookimpl
def minisgl_configs() -> Iterable[tuple[str, str, type]]:
    """Register the options of this plugin."""
    yield "kernels", "torch", TorchKernels
