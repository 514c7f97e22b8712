"""The interface of an FP8 matrix product. Products are plugins (`plugins/fp8_gemm/`).

A backend multiplies activations with a weight in e4m3. The layers (`minisgl.layers.fp8`) hold the weights; their layout
is described in `minisgl.kernel.fp8`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from minisgl.kernel.fp8 import Fp8Weight

__all__ = ["Fp8Gemm"]


class Fp8Gemm(Protocol):
    """The product of activations with an FP8 weight, for any number of rows."""

    def refuse(self, weight: Fp8Weight, dtype: torch.dtype) -> str:
        """Return why this backend can't multiply activations of ``dtype`` with ``weight``, or "" if it can.

        Called once for each matrix before weights are loaded, so only shapes and dtypes are known.
        """

    def load(self, weight: Fp8Weight, dtype: torch.dtype) -> Any:
        """Prepare a weight that was loaded; returns an object that the layer passes to `forward` as ``weight``.

        ``dtype`` is that of activations. Called only for weights that `refuse` accepted.
        """

    def forward(self, weight: Any, x: Tensor) -> Tensor:
        """Return x·weightᵀ [rows, out], in x's dtype, for x [rows, in].

        A backend may quantise x in groups of 1 × 128, or multiply it as it is (weight-only). Sums are in float32.
        """
