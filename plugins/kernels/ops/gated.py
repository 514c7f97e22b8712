"""A gated projection in one launch: the product with gate and up, and the activation on the result in registers.

In a prefill step the result of the merged gate-and-up projection is the largest tensor of a layer. As two launches, the
matrix product writes this tensor to memory and the activation reads it back; the fused launch keeps it on the chip.
With fewer rows there is less memory traffic to save, and cuBLAS has better tile shapes; so the fused kernel is used for
many rows only.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from minisgl.plugins.kernels.ops.activation import Act, act_and_mul


def gated_linear(x: Tensor, weight: Tensor, act: Act) -> Tensor | None:
    """Return act(x·gateᵀ)·(x·upᵀ) [rows, dim] in one launch, or None if that is not faster or not possible.

    x is [rows, in]; weight is [2·dim, in], the gate rows first. None means that the caller must launch the product and
    the activation separately: see `minisgl.plugins.kernels.ops.triton.gated.serves` for the conditions.
    """
    if not x.is_cuda:
        return None
    from minisgl.plugins.kernels.ops.triton import gated as triton

    return triton.gated_linear(x, weight, act) if triton.serves(x, weight) else None


def gated_linear_torch(x: Tensor, weight: Tensor, act: Act) -> Tensor:
    """Compute `gated_linear` in two operations, the product and the activation: the torch reference."""
    return act_and_mul(F.linear(x, weight), act)
