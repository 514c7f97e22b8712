"""Layers whose weights are integers of 4 or 8 bits with a scale for each group of columns, on a CPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    import torch

    from minisgl.plugins.quantization.base import Quantization

__all__ = ["IntegerOptions"]


@dataclass
class IntegerOptions:
    """The base of the options of ``quantize=int4`` and ``quantize=int8``: weights become integers at load.

    `.converter` has the conversion, and `minisgl.plugins.kernels.ops.grouped` the product.
    """

    bits: ClassVar[int]
    methods: ClassVar[tuple[str, ...]] = ()

    def build(self, device: torch.device, dtype: torch.dtype) -> Quantization:
        """Return the converter, for activations in ``dtype``."""
        from minisgl.plugins.quantization.grouped.converter import GroupedConverter

        return GroupedConverter(self.bits, device, dtype)
