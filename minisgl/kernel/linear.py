"""A linear layer's product: torch's; on a GPU kernels of our own for one row and, where the matrix is small, for few,
which torch's serve badly, and cuBLASLt's where it is not; on a CPU oneDNN's over a packed copy of a small matrix, which
for few rows is twice as fast as BLAS over the plain one."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl.kernel.launch import one_launch

PACKED_BYTES = 8 << 20
"""Larger matrices are not packed: they wait for memory however they lie in it, and a copy of them would hurt."""

FEW_ROWS = 256
"""Up to so many rows cuBLASLt picks better kernels on an H200 than cuBLAS does: 10 to 20 % for the large matrices."""


@dataclass(frozen=True, slots=True)
class Packed:
    """A weight in the layout that oneDNN reads fastest. Torch knows its shape, and no memory of it."""

    weight: Tensor


def pack(weight: Tensor) -> Packed | None:
    """A packed copy of weight [out, in]; None where there is no use in one."""
    if weight.device.type != "cpu" or weight.dtype != torch.float32 or weight.nbytes > PACKED_BYTES:
        return None
    if weight.numel() == 0 or not torch.backends.mkldnn.is_available():
        return None
    usual_rows = 32
    return Packed(torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), usual_rows))


@one_launch
def packed_linear(x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
    """x [..., in] → [..., out]."""
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed.weight, bias, "none", [], "")
    return out


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, packed: Packed | None = None) -> Tensor:
    """x [..., in], weight [out, in], bias [out] → [..., out]. ``packed`` is what `pack` made of the weight."""
    if packed is not None:
        return packed_linear(x, packed, bias)
    if x.is_cuda and x.dim() == 2 and x.shape[0] <= FEW_ROWS:
        return _few_rows(x, weight, bias)
    return F.linear(x, weight, bias)


def _few_rows(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    from minisgl.kernel.triton import linear as triton

    if x.stride(1) == 1 and weight.is_contiguous():
        if x.shape[0] == 1:
            return triton.one_row_linear(x, weight, bias)
        if triton.serves_few_rows(x, weight):
            return triton.few_rows_linear(x, weight, bias)
    # Torch goes to cuBLASLt where there is a bias.
    return F.linear(x, weight, _zeros(weight.shape[0], weight.dtype, weight.device) if bias is None else bias)


@functools.cache
def _zeros(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(size, dtype=dtype, device=device)
