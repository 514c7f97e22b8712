"""The interface of an FP8 matrix product. Products are plugins (`plugins/fp8_gemm/`).

A backend multiplies activations with a weight in e4m3. The layers (`plugins/quantization/e4m3/`) hold the weights;
`minisgl.plugins.kernels.ops.fp8` describes their layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from minisgl.plugins.kernels.ops.activation import Act
    from minisgl.plugins.kernels.ops.fp8 import Fp8Weight, QuantizedRows

__all__ = ["CompiledFp8Gemm", "Fp8Gemm", "GatedFp8Gemm"]


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

    def takes_quantized(self, weight: Any, rows: int) -> bool:
        """Return whether `forward` takes ``rows`` rows as `QuantizedRows`, and so need not quantise them itself.

        A norm or an activation before the product then quantises its result. ``weight`` is a result of `load`.
        """

    def forward(self, weight: Any, x: Tensor | QuantizedRows) -> Tensor:
        """Return x·weightᵀ [rows, out], in x's dtype, for x [rows, in].

        x is `QuantizedRows` only where `takes_quantized` is true for this number of rows. A backend may quantise other
        x in groups of 1 × 128, or multiply it as it is (weight-only). Sums are in float32.
        """


@runtime_checkable
class GatedFp8Gemm(Protocol):
    """An optional ability of an FP8 product: gate and up projection and activation in one launch."""

    def forward_gated(self, weight: Any, x: Tensor | QuantizedRows, act: Act) -> Tensor | None:
        """Return act(x·gateᵀ)·(x·upᵀ) [rows, out / 2], or None if two launches are faster or this shape is unsupported.

        ``weight`` has the rows of gate, then those of up; each is a multiple of 128 rows. See `Fp8Gemm.forward`.
        """
        ...


@runtime_checkable
class CompiledFp8Gemm(Protocol):
    """An optional ability of an FP8 product that compiles kernels while it multiplies: to compile them at the start."""

    def prepare(self, weights: Sequence[Any], rows: int) -> None:
        """Compile and load all kernels that products of ``weights`` with 1 to ``rows`` rows need.

        ``weights`` are results of `Fp8Gemm.load`. Called once, before the KV pool is allocated.
        """
        ...
