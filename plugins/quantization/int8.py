"""``quantize=int8``: weights become integers of 8 bits while they are loaded, on a CPU.

`minisgl.plugins.quantization.grouped` has the layers, and `minisgl.plugins.kernels.ops.grouped` the product.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from minisgl.hooks import hookimpl

if TYPE_CHECKING:
    import torch

    from minisgl.models.converter import Quantization


@dataclass
class Int8Quantization:
    """Linear layers, embedding and LM head in integers of 8 bits, with a scale for each 32 columns of a row."""

    methods: ClassVar[tuple[str, ...]] = ()

    def build(self, device: torch.device, dtype: torch.dtype) -> Quantization:
        from minisgl.plugins.quantization.grouped.converter import GroupedConverter

        return GroupedConverter(8, device, dtype)


@hookimpl
def minisgl_configs() -> Iterable[tuple[str, str, type]]:
    """Register the options of this plugin."""
    yield "quantization", "int8", Int8Quantization
