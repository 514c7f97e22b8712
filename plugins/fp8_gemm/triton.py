"""``fp8_gemm=triton``: weight-only products for few rows, e4m3 times e4m3 for many rows, in Triton.

The kernels are in `minisgl.plugins.kernels.ops.triton.fp8`. Rows decide which of them runs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from minisgl.config import ConfigError
from minisgl.hooks import hookimpl
from minisgl.utils.launch import one_launch

if TYPE_CHECKING:
    import torch

    from minisgl.plugins.kernels.ops.activation import Act
    from minisgl.plugins.kernels.ops.fp8 import Fp8Weight, QuantizedRows
    from minisgl.plugins.kernels.ops.fp8_gemm import Fp8Gemm

FEW_ROWS = 16
"""Up to this number of rows the weight-only kernel is faster on an H200: see docs/design/fp8.md."""


@dataclass
class Triton:
    """Triton kernels; on a CPU only under TRITON_INTERPRET=1 (slow)."""

    def build(self, device: torch.device) -> Fp8Gemm:
        return TritonFp8Gemm(device)


class TritonFp8Gemm:
    """The backend; see `minisgl.plugins.kernels.ops.fp8_gemm.Fp8Gemm` for shapes.

    Raises `ConfigError` on a CPU, unless Triton runs interpreted, and on a GPU without e4m3.
    """

    def __init__(self, device: torch.device):
        import torch
        import triton

        from minisgl.plugins.kernels.ops.triton import fp8

        if device.type != "cuda" and not triton.knobs.runtime.interpret:
            raise ConfigError("this product needs a CUDA device. On a CPU use fp8_gemm=torch.")
        if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
            raise ConfigError("this product needs a GPU of compute capability 8.9 or newer: use fp8_gemm=torch.")
        self.kernels = fp8

    def refuse(self, weight: Fp8Weight, dtype: torch.dtype) -> str:
        """Refuse matrices whose rows are not aligned for wide loads: see `Fp8Gemm.refuse`."""
        inner = weight.values.shape[1]
        return "" if inner % 16 == 0 else "fp8_gemm=triton needs a multiple of 16 columns: use fp8_gemm=torch."

    def load(self, weight: Fp8Weight, dtype: torch.dtype) -> Fp8Weight:
        """Keep the weight as it is: see `Fp8Gemm.load`."""
        return weight

    def takes_quantized(self, weight: Fp8Weight, rows: int) -> bool:
        """Return whether the product is not weight-only: see `Fp8Gemm.takes_quantized`."""
        return rows > FEW_ROWS

    @one_launch
    def forward(self, weight: Fp8Weight, x: torch.Tensor | QuantizedRows) -> torch.Tensor:
        """Compute the product with the kernel for this number of rows: see `Fp8Gemm.forward`."""
        from minisgl.plugins.kernels.ops.fp8 import QuantizedRows

        if isinstance(x, QuantizedRows):
            return self.kernels.product(x, weight)
        if x.stride(1) != 1:
            x = x.contiguous()
        if self.kernels.serves_one_row(x, weight):
            return self.kernels.one_row(x, weight)
        return self.kernels.few_rows(x, weight) if len(x) <= FEW_ROWS else self.kernels.many_rows(x, weight)

    @one_launch
    def forward_gated(self, weight: Fp8Weight, x: torch.Tensor | QuantizedRows, act: Act) -> torch.Tensor | None:
        """Compute one row: see `GatedFp8Gemm.forward_gated`."""
        from minisgl.plugins.kernels.ops.fp8 import QuantizedRows

        if isinstance(x, QuantizedRows) or not self.kernels.serves_one_row(x, weight):
            return None
        return self.kernels.one_row(x, weight, act)


@hookimpl
def minisgl_configs() -> Iterable[tuple[str, str, type]]:
    """Register the options of this plugin."""
    yield "fp8_gemm", "triton", Triton
