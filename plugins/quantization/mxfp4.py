"""``quantization=mxfp4``: experts in MXFP4: gpt-oss.

`minisgl.plugins.quantization.mx` reads the checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from minisgl.hooks import hookimpl

if TYPE_CHECKING:
    from minisgl.plugins.quantization.base import Quantization


@dataclass
class Mxfp4Quantization:
    """Experts in MXFP4: ``moe=triton`` multiplies them, and for other backends they are dequantised at load."""

    methods: ClassVar[tuple[str, ...]] = ("mxfp4",)
    """The values of ``quant_method`` in config.json that this plugin reads."""

    def build(self) -> Quantization:
        from minisgl.plugins.quantization.mx.fp4 import Mxfp4

        return Mxfp4()


@hookimpl
def minisgl_configs() -> Iterable[tuple[str, str, type]]:
    """Register the options of this plugin."""
    yield "quantization", "mxfp4", Mxfp4Quantization
