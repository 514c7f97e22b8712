"""RMSNorm, alone and with the residual added first: Triton on a GPU; C++ on a CPU with a compiler, else plain torch.

Before an FP8 product, the result can be quantised in the same launch.

The norm is computed in float32 in any dtype.

Zhang and Sennrich, Root Mean Square Layer Normalization, 2019.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from minisgl.plugins.kernels.ops.cpp import elementwise as cpp
from minisgl.plugins.kernels.ops.fp8 import QuantizedRows, quantize_rows


def prepare(weight: Tensor) -> None:
    """Compile the kernels for ``weight`` [dim] on a CPU now, so that the first step need not wait for the compiler."""
    cpp.serves(weight[None], len(weight))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Divide x [..., dim] by its root mean square over dim and multiply by weight [dim]."""
    if x.is_cuda:
        from minisgl.plugins.kernels.ops.triton import norm as triton

        return triton.rms_norm(x, weight, eps)
    if cpp.serves(x, x.shape[-1]) and x.dtype == weight.dtype:
        return cpp.rms_norm(x, weight, eps)
    return F.rms_norm(x, weight.shape, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return ``(rms_norm(x + residual), x + residual)``, each [..., dim].

    The sum may be written over x.
    """
    if x.is_cuda:
        from minisgl.plugins.kernels.ops.triton import norm as triton

        return triton.add_rms_norm(x, residual, weight, eps)
    if cpp.serves(x, x.shape[-1]) and x.dtype == weight.dtype == residual.dtype and residual.is_contiguous():
        return cpp.add_rms_norm(x, residual, weight, eps)
    residual = x.add_(residual)
    return F.rms_norm(residual, weight.shape, weight, eps), residual


def rms_norm_quantized(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[QuantizedRows, Tensor]:
    """Return ``(quantize_rows(rms_norm(x + residual)), x + residual)`` for x and residual [rows, dim].

    Without ``residual``, nothing is added. The sum may be written over x.
    """
    if x.is_cuda:
        from minisgl.plugins.kernels.ops.triton import norm as triton

        return triton.rms_norm_quantized(x, residual, weight, eps)
    if residual is None:
        return quantize_rows(rms_norm(x, weight, eps)), x
    normed, residual = add_rms_norm(x, residual, weight, eps)
    return quantize_rows(normed), residual
