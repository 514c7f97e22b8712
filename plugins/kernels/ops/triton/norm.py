"""RMSNorm in Triton, alone and with the residual added first: one program per row, one pass over memory.

The result can be quantised to e4m3 in the same launch.

`minisgl.plugins.kernels.ops.norm` has the torch references and describes arguments and results.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl.plugins.kernels.ops.fp8 import QuantizedRows
from minisgl.plugins.kernels.ops.triton.early import start_next, starts_early, wait_for_previous
from minisgl.plugins.kernels.ops.triton.quantize import GROUP, store_quantized


@triton.jit
def rms_norm_kernel(
    x, residual, weight, out, factors, stride_x, stride_residual, stride_factors, eps,
    DIM: tl.constexpr, ADD: tl.constexpr, QUANTIZE: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    """Normalise one row of x, with ADD after adding the residual; the sum is written over x.

    With QUANTIZE the result is rounded to x's dtype, and then quantised; BLOCK is then a multiple of 128.
    """
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    real = i < DIM
    by = tl.load(weight + i, mask=real, other=0.0).to(tl.float32)
    if EARLY:
        start_next()
        wait_for_previous()
    value = tl.load(x + row * stride_x + i, mask=real, other=0.0)
    if ADD:
        value = (value.to(tl.float32) + tl.load(residual + row * stride_residual + i, mask=real, other=0.0)).to(
            value.dtype  # round the sum first: the norm must see the value that is stored as the new residual
        )
        tl.store(x + row * stride_x + i, value, mask=real)
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / DIM + eps)
    scaled = (wide * scale * by).to(x.dtype.element_ty)
    if QUANTIZE:
        groups = tl.reshape(scaled.to(tl.float32), [BLOCK // GROUP, GROUP])
        store_quantized(groups, out, factors, row, 0, DIM, stride_factors, BLOCK // GROUP)
    else:
        tl.store(out + row * DIM + i, scaled, mask=real)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute `minisgl.plugins.kernels.ops.norm.rms_norm` on a GPU."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x if x.dim() == 2 else x.view(-1, len(weight)), None, weight, eps, out, None)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Compute `minisgl.plugins.kernels.ops.norm.add_rms_norm` on a GPU; the sum is written over x."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, residual, weight, eps, out, None)
    return out, x


def rms_norm_quantized(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[QuantizedRows, Tensor]:
    """Compute `minisgl.plugins.kernels.ops.norm.rms_norm_quantized` on a GPU; the sum is written over x."""
    out = QuantizedRows.empty(x, len(weight))
    _launch(x, residual, weight, eps, out.values, out.factors)
    return out, x


def _launch(
    rows: Tensor, residual: Tensor | None, weight: Tensor, eps: float, out: Tensor, factors: Tensor | None
) -> None:
    dim = weight.shape[0]
    added = rows if residual is None else residual
    block = triton.next_power_of_2(dim)
    if factors is not None:
        block = max(block, GROUP.value)
    rms_norm_kernel[(rows.shape[0],)](
        rows, added, weight, out, factors, rows.stride(0), added.stride(0), 0 if factors is None else factors.stride(1),
        eps, DIM=dim, ADD=residual is not None, QUANTIZE=factors is not None, BLOCK=block,
        num_warps=min(16, max(1, block // 512)), **starts_early(rows),
    )  # fmt: skip
