"""``quantize=int8``: weights become integers of 8 bits while they are loaded, on a CPU."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from minisgl.hooks import hookimpl
from minisgl.plugins.quantization.grouped import IntegerOptions


@dataclass
class Int8Quantization(IntegerOptions):
    """Linear layers, embedding and LM head in integers of 8 bits, with a scale for each 32 columns of a row."""

    bits: ClassVar[int] = 8


@hookimpl
def minisgl_configs() -> Iterable[tuple[str, str, type]]:
    """Register the options of this plugin."""
    yield "quantization", "int8", Int8Quantization
