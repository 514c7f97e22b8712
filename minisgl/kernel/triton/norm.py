"""RMSNorm in Triton, alone and with the residual added first: one program per row, one pass over memory.

`minisgl.kernel.norm` has the torch references and describes arguments and results.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernel.triton.early import start_next, starts_early, wait_for_previous


@triton.jit
def rms_norm_kernel(
    x, residual, weight, out, stride_x, stride_residual, eps,
    DIM: tl.constexpr, ADD: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    """Normalise one row of x, with ADD after adding the residual; the sum is written over x."""
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
    scaled = wide * scale * by
    tl.store(out + row * DIM + i, scaled.to(out.dtype.element_ty), mask=real)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute `minisgl.kernel.norm.rms_norm` on a GPU."""
    return _launch(x, None, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Compute `minisgl.kernel.norm.add_rms_norm` on a GPU; the sum is written over x."""
    return _launch(x, residual, weight, eps), x


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    dim = weight.shape[0]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows = x if x.dim() == 2 else x.view(-1, dim)
    added = rows if residual is None else residual
    block = triton.next_power_of_2(dim)
    rms_norm_kernel[(rows.shape[0],)](
        rows, added, weight, out, rows.stride(0), added.stride(0), eps,
        DIM=dim, ADD=residual is not None, BLOCK=block, num_warps=min(16, max(1, block // 512)),
        **starts_early(x),
    )  # fmt: skip
    return out
