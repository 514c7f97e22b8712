"""RMSNorm, alone and with the residual added first: the plain torch versions, computed in float32 inside.

Zhang and Sennrich, Root Mean Square Layer Normalization, 2019.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., dim] divided by its root mean square over dim, times weight [dim]."""
    return F.rms_norm(x, weight.shape, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``(rms_norm(x + residual), x + residual)``; the sum may be written over x."""
    residual = x.add_(residual)
    return F.rms_norm(residual, weight.shape, weight, eps), residual
