"""Quantisation of activations to e4m3 in Triton, in groups of 128 columns of a row.

`quantize_rows` is a launch of its own. A kernel that computes activations calls `store_quantized` instead, which saves
this launch. `minisgl.plugins.kernels.ops.fp8` has the layout and the torch reference.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from minisgl.plugins.kernels.ops.fp8 import BLOCK, QuantizedRows, blocks
from minisgl.plugins.kernels.ops.triton.device import device_function
from minisgl.plugins.kernels.ops.triton.early import start_next, starts_early, wait_for_previous

GROUP = tl.constexpr(BLOCK)
LARGEST = tl.constexpr(448.0)


@device_function
def store_quantized(a, values, factors, row, first, IN, stride_factors, GROUPS: tl.constexpr):
    """Quantise GROUPS groups of 128 columns, a [GROUPS, 128] in float32, of one row from group ``first`` on.

    Columns of a from IN on must be 0. ``values`` and ``factors`` are those of
    `minisgl.plugins.kernels.ops.fp8.QuantizedRows`.
    """
    group = first + tl.arange(0, GROUPS)
    col = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    largest = tl.max(tl.abs(a), 1)
    scale = tl.div_rn(tl.full([GROUPS], LARGEST, tl.float32), tl.where(largest > 0, largest, LARGEST))
    scaled = tl.clamp(a * scale[:, None], -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    tl.store(values + row * IN + col, scaled.to(values.dtype.element_ty), mask=col < IN)
    inverse = tl.div_rn(tl.full([GROUPS], 1.0, tl.float32), scale)
    tl.store(factors + group.to(tl.int64) * stride_factors + row, inverse, mask=group < tl.cdiv(IN, GROUP))


@triton.jit
def quantize_rows_kernel(
    x, values, factors, IN, stride_x, stride_factors, GROUPS: tl.constexpr, EARLY: tl.constexpr = False
):
    """Quantise ``GROUPS`` groups of 128 columns of one row."""
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * GROUPS
    col = first * GROUP + tl.arange(0, GROUPS)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    if EARLY:
        start_next()
        wait_for_previous()
    a = tl.load(x + row * stride_x + col, mask=col < IN, other=0.0).to(tl.float32)
    store_quantized(a, values, factors, row, first, IN, stride_factors, GROUPS)


def quantize_rows(x: Tensor) -> QuantizedRows:
    """Compute `minisgl.plugins.kernels.ops.fp8.quantize_rows` of x [rows, in] on a GPU."""
    rows, inner = x.shape
    out = QuantizedRows.empty(x, inner)
    groups = min(8, triton.next_power_of_2(blocks(inner)))
    quantize_rows_kernel[(rows, triton.cdiv(blocks(inner), groups))](
        x, out.values, out.factors, inner, x.stride(0), out.factors.stride(1), GROUPS=groups, num_warps=4,
        **starts_early(x),
    )  # fmt: skip
    return out
