"""The matrix product of a linear layer, with the fastest kernel for each device and shape.

On a GPU: a Triton kernel for one row, a Triton kernel for at most 64 rows if the matrix is small, another one for at
most 8 rows if the matrix is large, cuBLASLt for other products of at most `FEW_ROWS` rows, and torch's default (cuBLAS)
for more rows. On a CPU, for weights in bfloat16 and float32: C++ kernels, if they can be compiled, for the numbers of
rows in `minisgl.plugins.kernels.ops.cpp.linear.ROWS`. For a small matrix in float32 they read a packed copy of it,
except for 1 or 2 rows. Without a compiler, oneDNN reads such a copy, if the number of rows is in `ONEDNN_PACKED_ROWS`.
All other products are torch's default, which is BLAS for float32 and oneDNN for the 16-bit dtypes.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl.plugins.kernels.ops.cpp import linear as cpp
from minisgl.utils.launch import one_launch

PACKED_BYTES = 8 << 20
"""Matrices of more than this number of bytes are not packed. Their product is limited by memory bandwidth in any
layout, and the packed copy would double their memory."""

ONEDNN_PACKED_ROWS = range(3, 65)
"""Numbers of rows for which oneDNN is up to 1.8 times as fast as BLAS with a packed copy, if the matrix has 1 MiB or
more. With more rows it is not faster, and with 1 or 2 rows it is slower."""

ONEDNN_ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, 64, 128, 256)
"""Numbers of rows with which oneDNN is called; blocks of other sizes are padded. For each new number of rows oneDNN
generates a kernel, which takes about 1 ms and, in float32, 0.56 MiB for each shape of a weight. Half of that memory is
never freed, not even with ONEDNN_PRIMITIVE_CACHE_CAPACITY=0. So the rows of a chunk of a prompt, whose number is
different each time, must not reach oneDNN as they are (docs/design/cpu-memory.md)."""

_PADDING = [next(size for size in ONEDNN_ROWS if size >= rows) - rows for rows in range(ONEDNN_ROWS[-1] + 1)]

FEW_ROWS = 256
"""Up to this number of rows cuBLASLt is faster than cuBLAS on an H200: by 10 to 20 % for large matrices."""


@dataclass(frozen=True, slots=True)
class Packed:
    """A copy of a weight [out, in] for products of few rows on a CPU.

    ``weight`` is in oneDNN's blocked layout, an opaque tensor whose memory torch can't read; or, with ``cpp``, the
    result of `minisgl.plugins.kernels.ops.cpp.linear.pack`. ``rows`` are the numbers of rows for which the copy is
    used.
    """

    weight: Tensor
    out_size: int
    cpp: bool
    rows: range


def pack(weight: Tensor) -> Packed | None:
    """Return a packed copy of weight [out, in], or None if packing does not help.

    None is returned on a GPU, for dtypes other than float32, for empty weights, for weights larger than `PACKED_BYTES`,
    and if there is neither a C++ compiler nor oneDNN in torch. On a CPU the C++ kernels are compiled now, so that the
    first step need not wait for the compiler.
    """
    if weight.device.type != "cpu" or weight.numel() == 0:
        return None
    in_cpp = cpp.serves(weight)
    if weight.dtype != torch.float32 or weight.nbytes > PACKED_BYTES:
        return None
    if in_cpp:
        rows = cpp.rows()
        return Packed(cpp.pack(weight), len(weight), True, range(rows.packed, rows.served[weight.dtype] + 1))
    if not torch.backends.mkldnn.is_available():
        return None
    usual_rows = 32
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), usual_rows)
    return Packed(packed, len(weight), False, ONEDNN_PACKED_ROWS)


def packed_linear(x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
    """Multiply x [rows, in] with a packed weight; returns [rows, out]. ``rows`` is at most ``ONEDNN_ROWS[-1]``."""
    if packed.cpp:
        return cpp.packed_linear(x, packed.weight, packed.out_size, bias)
    return onednn_linear(x, packed, bias)


@one_launch
def onednn_linear(x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
    """Compute `packed_linear` with oneDNN."""
    rows = x.shape[0]
    padding = _PADDING[rows]
    if not padding:
        return torch.ops.mkldnn._linear_pointwise(x, packed.weight, bias, "none", [], "")  # type: ignore[no-any-return]
    x = torch.constant_pad_nd(x, (0, 0, 0, padding))
    return torch.ops.mkldnn._linear_pointwise(x, packed.weight, bias, "none", [], "")[:rows]  # type: ignore[no-any-return]


@one_launch
def sixteen_bit_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply x [rows, in] with weight [out, in] on a CPU, in bfloat16 or float16; returns [rows, out].

    The product is computed in blocks of rows. The number of rows of each block is one of `ONEDNN_ROWS`.
    """
    done = []
    for block in x.split(ONEDNN_ROWS[-1]):
        padded = torch.constant_pad_nd(block, (0, 0, 0, _PADDING[len(block)]))
        done.append(F.linear(padded, weight, bias)[: len(block)])
    return done[0] if len(done) == 1 else torch.cat(done)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, packed: Packed | None = None) -> Tensor:
    """Return x·weightᵀ + bias: x [..., in], weight [out, in], bias [out] → [..., out].

    ``packed`` is the result of `pack` for the same weight. If given, it is used for its numbers of rows.
    """
    if x.device.type == "cpu" and x.dim() == 2:
        if packed is not None and len(x) in packed.rows:
            return packed_linear(x, packed, bias)
        if x.dtype == weight.dtype and cpp.serves(weight) and 0 < len(x) <= cpp.rows().served[x.dtype]:
            return cpp.linear(x, weight, bias)
        if x.dtype in (torch.bfloat16, torch.float16):  # torch calls oneDNN for these, but not for float32
            return sixteen_bit_linear(x, weight, bias)
    if x.is_cuda and x.dim() == 2 and x.shape[0] <= FEW_ROWS:
        return _few_rows(x, weight, bias)
    return F.linear(x, weight, bias)


def _few_rows(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute the product on a GPU for x [rows, in] with at most `FEW_ROWS` rows."""
    from minisgl.plugins.kernels.ops.triton import linear as triton

    if x.stride(1) == 1 and weight.is_contiguous():
        if x.shape[0] == 1:
            return triton.one_row_linear(x, weight, bias)
        if triton.serves_few_rows(x, weight):
            return triton.few_rows_linear(x, weight, bias)
        if triton.serves_eight_rows(x, weight):
            return triton.eight_rows_linear(x, weight, bias)
    # torch calls cuBLASLt instead of cuBLAS only if there is a bias, so pass a bias of zeros.
    return F.linear(x, weight, _zeros(weight.shape[0], weight.dtype, weight.device) if bias is None else bias)


@functools.cache
def _zeros(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(size, dtype=dtype, device=device)
