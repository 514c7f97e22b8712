"""A gated projection in one launch: the product with gate and up, and the activation while both are still in registers.

For a prompt the merged projection's result is the largest tensor of a layer. Apart, the product writes it and the
activation reads it back; together, it never leaves the chip. For fewer rows there is less to save, and cuBLAS has tiles
that suit them better.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from minisgl.kernel.activation import Act, act_and_mul


def gated_linear(x: Tensor, weight: Tensor, act: Act) -> Tensor | None:
    """x [rows, in], weight [2·dim, in], gate before up → act(x·gateᵀ)·(x·upᵀ) [rows, dim] in one launch; None where
    that is not faster than two, or the device can't: see `minisgl.kernel.triton.gated`."""
    if not x.is_cuda:
        return None
    from minisgl.kernel.triton import gated as triton

    return triton.gated_linear(x, weight, act) if triton.serves(x, weight) else None


def gated_linear_torch(x: Tensor, weight: Tensor, act: Act) -> Tensor:
    """The same in two: the product, and the activation of its halves."""
    return act_and_mul(F.linear(x, weight), act)
