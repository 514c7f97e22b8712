"""``quantization=gguf``: weights in the single file that llama.cpp uses.

`.ggml.header` reads the file's metadata, `.ggml.config` and `.ggml.vocabulary` turn it into the files of a Hugging Face
checkpoint, and `.ggml.view` writes these into a cache directory, once for each file. So the rest of minisgl reads a
checkpoint as always. Only the weights stay in the GGUF file: the config.json of the view names it, and selects
``quantization=gguf``, which reads them (`.ggml.checkpoint`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from minisgl.hooks import hookimpl

if TYPE_CHECKING:
    import torch

    from minisgl.plugins.quantization.base import Quantization


@dataclass
class GgufQuantization:
    """The weights of a GGUF file."""

    weights: str = "auto"
    """``quantized`` keeps the integers that the file stores, on a CPU, and multiplies them with activations that are
    rounded to 8 bits, as llama.cpp does. ``dequantized`` converts them to the option ``dtype`` while they are loaded.
    ``auto`` is quantized on a CPU with a C++ compiler, else dequantized."""

    methods: ClassVar[tuple[str, ...]] = ("gguf",)
    """The values of ``quant_method`` in config.json that this plugin reads."""

    def build(self, device: torch.device, dtype: torch.dtype) -> Quantization:
        from minisgl.plugins.quantization.ggml.converter import GgufConverter

        return GgufConverter(self.weights, device, dtype)


@hookimpl
def minisgl_configs() -> Iterable[tuple[str, str, type]]:
    """Register the options of this plugin."""
    yield "quantization", "gguf", GgufQuantization
