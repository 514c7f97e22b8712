"""A matrix times one row in Triton: what a decode step of one request spends its time on.

Nothing is computed twice here and every weight is read once, so the time is bytes over bandwidth; the tiles are those
that came nearest to it on an H200 (docs/benchmarks). The plain twin is in `minisgl.kernel.linear`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernel.triton.early import start_next, starts_early, wait_for_previous


@triton.jit
def one_row_kernel(
    x, weight, bias, y, OUT, IN, HAS_BIAS: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    EARLY: tl.constexpr = False,
):  # fmt: skip
    """Each program has ``ROWS`` rows of the weight and goes along them ``COLS`` columns at a time, one step ahead: the
    first weights are on their way before x is written."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, COLS)
    inside = (row < OUT)[:, None]
    weight += row[:, None].to(tl.int64) * IN + col[None, :]
    ahead = tl.load(weight, mask=inside if EVEN else inside & (col < IN)[None, :], other=0.0)
    if EARLY:
        start_next()
        wait_for_previous()
    total = tl.zeros([ROWS, COLS], tl.float32)
    for start in range(0, IN, COLS):
        b = ahead
        ahead = tl.load(weight + start + COLS, mask=inside & (start + COLS + col < IN)[None, :], other=0.0)
        if EVEN:
            a = tl.load(x + start + col)
        else:
            a = tl.load(x + start + col, mask=start + col < IN, other=0.0)
        total += b.to(tl.float32) * a.to(tl.float32)[None, :]
    out = tl.sum(total, axis=1)  # once, at the end: a sum across threads is dear
    if HAS_BIAS:
        out += tl.load(bias + row, mask=row < OUT, other=0.0).to(tl.float32)
    tl.store(y + row, out.to(y.dtype.element_ty), mask=row < OUT)


def one_row_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    rows, cols = weight.shape
    # Few outputs: thin tiles, so that every multiprocessor has one. Else tiles of 8 rows.
    tile, step, warps = (4, 1024, 8) if rows <= 2048 else (8, 512, 4)
    step = min(step, triton.next_power_of_2(cols))
    y = torch.empty((1, rows), dtype=x.dtype, device=x.device)
    one_row_kernel[(triton.cdiv(rows, tile),)](
        x, weight, bias, y, rows, cols, HAS_BIAS=bias is not None, EVEN=cols % step == 0, ROWS=tile, COLS=step,
        num_warps=warps, **starts_early(x),
    )  # fmt: skip
    return y
