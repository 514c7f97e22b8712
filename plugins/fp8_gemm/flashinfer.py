"""``fp8_gemm=flashinfer``: FlashInfer's product with block scales for Hopper GPUs, which also quantises activations.

It is compiled when it is first used, which takes one to two minutes. The product contains DeepGEMM, which compiles a
kernel of its own for each shape of a weight and each range of row counts, in about two seconds: see
`minisgl.plugins.kernels.ops.fp8_compiler`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from minisgl.config import ConfigError
from minisgl.hooks import hookimpl
from minisgl.utils.launch import one_launch

if TYPE_CHECKING:
    import torch

    from minisgl.plugins.kernels.ops.fp8 import Fp8Weight, QuantizedRows
    from minisgl.plugins.kernels.ops.fp8_behind import Behind
    from minisgl.plugins.kernels.ops.fp8_gemm import Fp8Gemm


@dataclass
class FlashInfer:
    """FlashInfer's product with block scales; needs a Hopper GPU and bfloat16."""

    def build(self, device: torch.device) -> Fp8Gemm:
        return FlashInferFp8Gemm(device)


class FlashInferFp8Gemm:
    """The backend; see `minisgl.plugins.kernels.ops.fp8_gemm.Fp8Gemm` for shapes. Only some devices have it."""

    def __init__(self, device: torch.device):
        import torch
        from flashinfer.gemm import fp8_blockscale_gemm_sm90

        if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
            raise ConfigError("this product needs a Hopper GPU: use fp8_gemm=auto.")
        self.product = fp8_blockscale_gemm_sm90

    def refuse(self, weight: Fp8Weight, dtype: torch.dtype) -> str:
        """Refuse dtypes other than bfloat16, and sizes that are no multiples of 64 × 128: see `Fp8Gemm.refuse`."""
        out, inner = weight.values.shape
        if str(dtype) != "torch.bfloat16":
            return f"fp8_gemm=flashinfer needs dtype=bfloat16, not {str(dtype).removeprefix('torch.')}."
        return "" if out % 64 == inner % 128 == 0 else "fp8_gemm=flashinfer needs multiples of 64 rows and 128 columns."

    def load(self, weight: Fp8Weight, dtype: torch.dtype) -> Fp8Weight:
        """Keep the weight as it is: see `Fp8Gemm.load`."""
        return weight

    def takes_quantized(self, weight: Fp8Weight, rows: int) -> bool:
        """Return True: see `Fp8Gemm.takes_quantized`."""
        return True

    @one_launch
    def forward(self, weight: Fp8Weight, x: torch.Tensor | QuantizedRows) -> torch.Tensor:
        """Quantise x if it is not yet, and multiply: see `Fp8Gemm.forward`."""
        from minisgl.plugins.kernels.ops.fp8 import QuantizedRows

        rows, factors = (x.values, x.factors) if isinstance(x, QuantizedRows) else (x.contiguous(), None)
        out: torch.Tensor = self.product(rows, weight.values, factors, weight.scale_inv)
        return out

    def prepare(self, weights: Sequence[Fp8Weight], rows: int) -> None:
        """Compile DeepGEMM's kernels: see `CompiledFp8Gemm.prepare`."""
        from minisgl.plugins.kernels.ops.fp8_compiler import prepare

        prepare(self.product, weights, rows)

    def is_prepared(self, weights: Sequence[Fp8Weight], rows: int) -> bool:
        """Return whether all kernels are on disk: see `minisgl.plugins.kernels.ops.fp8_behind.SlowFp8Gemm`."""
        from minisgl.plugins.kernels.ops.fp8_compiler import is_prepared

        return is_prepared(self.product, weights, rows)

    def prepare_behind(self, weights: Sequence[Fp8Weight], rows: int) -> Behind:
        """Compile DeepGEMM's kernels in other processes: see `minisgl.plugins.kernels.ops.fp8_behind.SlowFp8Gemm`."""
        from minisgl.plugins.kernels.ops.fp8_behind import Behind

        return Behind(self.product, weights, rows)


@hookimpl
def minisgl_configs() -> Iterable[tuple[str, str, type]]:
    """Register the options of this plugin."""
    yield "fp8_gemm", "flashinfer", FlashInfer
