"""``quantization=gguf``: the weights of a GGUF file, which the view of the file names in its config.json.

`minisgl.plugins.sources.gguf` makes the view, `minisgl.plugins.quantization.ggml` reads the weights.
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
class GgufQuantization:
    """The weights of a GGUF file, dequantised to the model's dtype while they are loaded."""

    methods: ClassVar[tuple[str, ...]] = ("gguf",)
    """The values of ``quant_method`` in config.json that this plugin reads."""

    def build(self, device: torch.device, dtype: torch.dtype) -> Quantization:
        from minisgl.plugins.quantization.ggml.converter import GgufConverter

        return GgufConverter()


@hookimpl
def minisgl_configs() -> Iterable[tuple[str, str, type]]:
    """Register the options of this plugin."""
    yield "quantization", "gguf", GgufQuantization
