"""``fp8_gemm=torch``: the FP8 product in plain torch, for any device, shape and dtype. The reference for all others.

Each product converts the whole weight to float32 first, so it is slow. It shows what FP8 changes, and costs the memory
of FP8.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from minisgl.hooks import hookimpl

if TYPE_CHECKING:
    import torch

    from minisgl.plugins.kernels.ops.fp8 import Fp8Weight, QuantizedRows
    from minisgl.plugins.kernels.ops.fp8_gemm import Fp8Gemm


@dataclass
class Torch:
    """Quantise activations, convert both sides to float32 and multiply; in plain torch."""

    def build(self) -> Fp8Gemm:
        return TorchFp8Gemm()


class TorchFp8Gemm:
    """The backend; see `minisgl.plugins.kernels.ops.fp8_gemm.Fp8Gemm` for shapes."""

    def refuse(self, weight: Fp8Weight, dtype: torch.dtype) -> str:
        """Return "": plain torch multiplies any shape and dtype."""
        return ""

    def load(self, weight: Fp8Weight, dtype: torch.dtype) -> Fp8Weight:
        """Keep the weight as it is: see `Fp8Gemm.load`."""
        return weight

    def takes_quantized(self, weight: Fp8Weight, rows: int) -> bool:
        """Return False: no launch is saved in plain torch."""
        return False

    def forward(self, weight: Fp8Weight, x: torch.Tensor | QuantizedRows) -> torch.Tensor:
        """Compute `minisgl.plugins.kernels.ops.fp8.fp8_linear_torch`: see `Fp8Gemm.forward`."""
        from minisgl.plugins.kernels.ops.fp8 import fp8_linear_torch

        return fp8_linear_torch(x, weight)


@hookimpl
def minisgl_configs() -> Iterable[tuple[str, str, type]]:
    """Register the options of this plugin."""
    yield "fp8_gemm", "torch", Torch
