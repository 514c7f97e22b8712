"""RMSNorm, alone and with the residual added first: plain torch on a CPU, Triton on a GPU.

The norm is computed in float32 in any dtype.

Zhang and Sennrich, Root Mean Square Layer Normalization, 2019.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Divide x [..., dim] by its root mean square over dim and multiply by weight [dim]."""
    if x.is_cuda:
        from minisgl.kernel.triton import norm as triton

        return triton.rms_norm(x, weight, eps)
    return F.rms_norm(x, weight.shape, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return ``(rms_norm(x + residual), x + residual)``, each [..., dim].

    The sum may be written over x.
    """
    if x.is_cuda:
        from minisgl.kernel.triton import norm as triton

        return triton.add_rms_norm(x, residual, weight, eps)
    residual = x.add_(residual)
    return F.rms_norm(residual, weight.shape, weight, eps), residual
