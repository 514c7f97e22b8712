"""A gated projection in one launch: the product with gate and up, and the activation while both are still in registers.

For a prompt the merged projection's result is the largest tensor of a layer. Apart, the product writes it and the
activation reads it back; together, it never leaves the chip. Where rows are few, nearly all that is read are weights,
and there is little to save.
"""

from __future__ import annotations

from typing import Literal

import torch.nn.functional as F
from torch import Tensor

from minisgl.kernel.activation import gelu_and_mul, silu_and_mul

Gate = Literal["silu", "gelu", "gelu_tanh"]


def gated_linear(x: Tensor, weight: Tensor, gate: Gate) -> Tensor | None:
    """x [rows, in], weight [2·dim, in], gate before up → gate(x·gateᵀ)·(x·upᵀ) [rows, dim] in one launch; None where
    that is not faster than two, or the device can't: see `minisgl.kernel.triton.gated`."""
    if not x.is_cuda:
        return None
    from minisgl.kernel.triton import gated as triton

    return triton.gated_linear(x, weight, gate) if triton.serves(x, weight) else None


def gated_linear_torch(x: Tensor, weight: Tensor, gate: Gate) -> Tensor:
    """The same in two: the product, and the activation of its halves."""
    both = F.linear(x, weight)
    return silu_and_mul(both) if gate == "silu" else gelu_and_mul(both, "tanh" if gate == "gelu_tanh" else "none")
