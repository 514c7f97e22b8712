"""``quantization=fp8``: linear layers in FP8, from a checkpoint in FP8 or with the option ``quantize=fp8``.

The option ``fp8_gemm`` selects the product. `minisgl.plugins.quantization.e4m3` has the layers and the checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from minisgl.hooks import hookimpl

if TYPE_CHECKING:
    import torch

    from minisgl.plugins.quantization.base import Quantization


@dataclass
class Fp8Quantization:
    """Linear layers in FP8: e4m3 with a scale for each block of 128 × 128."""

    methods: ClassVar[tuple[str, ...]] = ("fp8", "compressed-tensors", "fbgemm_fp8", "modelopt")
    """The values of ``quant_method`` in config.json that this plugin reads."""

    def build(self, device: torch.device, dtype: torch.dtype, build_part: Callable[[str], Any]) -> Quantization:
        from minisgl.plugins.quantization.e4m3.converter import Fp8Converter

        return Fp8Converter(device, dtype, lambda: build_part("fp8_gemm"))


@hookimpl
def minisgl_configs() -> Iterable[tuple[str, str, type]]:
    """Register the options of this plugin."""
    yield "quantization", "fp8", Fp8Quantization
