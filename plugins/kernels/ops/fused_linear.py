"""Matrix products fused with the RMSNorm, the addition or the activation beside them: torch references.

`minisgl.plugins.kernels.ops.triton.fused_linear` computes the same on a GPU, and explains how a norm is divided between
the product before it and the product after it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from minisgl.plugins.kernels.ops.activation import Act, act_and_mul


class ResidualStream(NamedTuple):
    """The residual stream x [rows, hidden], prepared for the next RMSNorm.

    ``scaled`` [rows, hidden] is x times the weight of the norm. ``squares`` [parts, rows] float32 is the sum of x² over
    the columns of each part; the parts together are all columns. The norm divides ``scaled`` by the root mean square
    that follows from ``squares``. None: it divides by nothing.
    """

    x: Tensor
    scaled: Tensor
    squares: Tensor | None


def add_linear_torch(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, norm_weight: Tensor | None
) -> ResidualStream:
    """Return residual + x·weightᵀ + bias for x [rows, in], weight [out, in] and residual [rows, out].

    The result is prepared for a norm with ``norm_weight`` [out]. None: no norm follows, and ``scaled`` is x.
    """
    y = residual + F.linear(x, weight, bias)
    if norm_weight is None:
        return ResidualStream(y, y, None)
    return ResidualStream(y, y * norm_weight, y.float().square().sum(1)[None])


def normed_linear_torch(
    x: Tensor, squares: Tensor | None, eps: float, weight: Tensor, bias: Tensor | None = None, act: Act | None = None
) -> Tensor:
    """Return norm(x)·weightᵀ + bias [rows, out], for x [rows, in] and weight [out, in].

    x is ``ResidualStream.scaled``, and the norm divides it by its root mean square, which follows from ``squares`` and
    ``eps``. Without ``squares``, x is not divided. With ``act``, weight and bias hold gate and up one after the other,
    and the result is act(gate)·up.
    """
    if squares is not None:
        x = x * (squares.sum(0) / x.shape[1] + eps).rsqrt()[:, None].to(x.dtype)
    y = F.linear(x, weight, bias)
    return y if act is None else act_and_mul(y, act)
