"""Matrix products with one row or a few rows of x, in Triton: the main cost of a small model's decode steps.

Every weight is read once, so the lower bound of the time is weight bytes / memory bandwidth, plus the launch overhead.
The tiles are those that came nearest to this bound on an H200 (docs/benchmarks). The torch reference is in
`minisgl.plugins.kernels.ops.linear`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl.plugins.kernels.ops.triton.device import is_hopper
from minisgl.plugins.kernels.ops.triton.early import start_next, starts_early, wait_for_previous

LARGE_BYTES = 64 << 20
"""The smallest matrix in bytes for which `eight_rows_linear` was faster than cuBLASLt on an H200."""


@triton.jit
def one_row_kernel(
    x, weight, bias, y, OUT, IN, HAS_BIAS: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    EARLY: tl.constexpr = False,
):  # fmt: skip
    """Compute ``ROWS`` outputs of a product with one row of x. One program: ``ROWS`` rows of the weight.

    The program loops over the columns, ``COLS`` at a time, and loads the next columns of the weight one iteration
    ahead. With EARLY the first weights are loaded before the program waits for the preceding kernel, which writes x.
    """
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
    out = tl.sum(total, axis=1)  # once, after the loop: a sum across threads is expensive
    if HAS_BIAS:
        out += tl.load(bias + row, mask=row < OUT, other=0.0).to(tl.float32)
    tl.store(y + row, out.to(y.dtype.element_ty), mask=row < OUT)


def one_row_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x·weightᵀ + bias for one row: x [1, in], weight [out, in] → [1, out]."""
    rows, cols = weight.shape
    # Few outputs: tiles of 4 weight rows, so that every multiprocessor has a tile. Else tiles of 8 rows.
    tile, step, warps = (4, 1024, 8) if rows <= 2048 else (8, 512, 4)
    step = min(step, triton.next_power_of_2(cols))
    y = torch.empty((1, rows), dtype=x.dtype, device=x.device)
    one_row_kernel[(triton.cdiv(rows, tile),)](
        x, weight, bias, y, rows, cols, HAS_BIAS=bias is not None, EVEN=cols % step == 0, ROWS=tile, COLS=step,
        num_warps=warps, **starts_early(x),
    )  # fmt: skip
    return y


@triton.jit(do_not_specialize=["rows"])
def few_rows_kernel(
    x, weight, bias, y, rows, OUT, IN, stride_x, HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    """Compute ``BLOCK_N`` outputs for all rows of x. One program: ``BLOCK_N`` rows of the weight.

    OUT is a multiple of BLOCK_N, and IN is a multiple of BLOCK_K.
    """
    m, n, k = tl.arange(0, BLOCK_M), tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    if EARLY:
        start_next()
        wait_for_previous()
    x_at = x + m[:, None] * stride_x + k[None, :]
    weight_at = weight + n[None, :].to(tl.int64) * IN + k[:, None]
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, IN, BLOCK_K):
        a = tl.load(x_at + start, mask=m[:, None] < rows, other=0.0)
        total = tl.dot(a, tl.load(weight_at + start), total, input_precision="ieee")
    if HAS_BIAS:
        total += tl.load(bias + n).to(tl.float32)[None, :]
    tl.store(y + m[:, None] * OUT + n[None, :], total.to(y.dtype.element_ty), mask=m[:, None] < rows)


@triton.jit(do_not_specialize=["rows"])
def eight_rows_kernel(
    x, weight, bias, y, rows, OUT, IN, stride_x, HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    """Compute ``BLOCK_N`` outputs for up to 8 rows of x. One program: ``BLOCK_N`` rows of the weight.

    The weight is the left operand of the product: a tensor core multiplies 16 rows of the left operand by 8 columns of
    the right one, so 8 rows of x need no padding there. OUT is a multiple of BLOCK_N, and IN is a multiple of BLOCK_K.
    """
    m, n, k = tl.arange(0, 8), tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    if EARLY:
        start_next()
        wait_for_previous()
    x_at = x + m[None, :] * stride_x + k[:, None]
    weight_at = weight + n[:, None].to(tl.int64) * IN + k[None, :]
    total = tl.zeros([BLOCK_N, 8], tl.float32)
    for start in range(0, IN, BLOCK_K):
        a = tl.load(x_at + start, mask=m[None, :] < rows, other=0.0)
        total = tl.dot(tl.load(weight_at + start), a, total, input_precision="ieee")
    if HAS_BIAS:
        total += tl.load(bias + n).to(tl.float32)[:, None]
    tl.store(y + m[None, :] * OUT + n[:, None], total.to(y.dtype.element_ty), mask=m[None, :] < rows)


def serves_eight_rows(x: Tensor, weight: Tensor) -> bool:
    """Return whether `eight_rows_linear` supports these and is faster than cuBLASLt: a large half-precision matrix."""
    out, inner = weight.shape
    return x.shape[0] <= 8 and weight.nbytes >= LARGE_BYTES and out % 64 == 0 and inner % 256 == 0 and x.itemsize == 2


def eight_rows_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x·weightᵀ + bias: x [rows, in], at most 8 rows → [rows, out]. See `serves_eight_rows`."""
    rows, (out, inner) = x.shape[0], weight.shape
    tile, stages = 64, 3 if out >= 16384 else 4  # with three stages, two programs fit on a multiprocessor
    y = torch.empty((rows, out), dtype=x.dtype, device=x.device)
    eight_rows_kernel[(out // tile,)](
        x, weight, bias, y, rows, out, inner, x.stride(0), HAS_BIAS=bias is not None,
        BLOCK_N=tile, BLOCK_K=256, num_warps=2, num_stages=stages, **starts_early(x),
    )  # fmt: skip
    return y


def serves_few_rows(x: Tensor, weight: Tensor) -> bool:
    """Return whether `few_rows_linear` supports these and is faster than cuBLASLt: a small half-precision matrix."""
    out, inner = weight.shape
    return x.shape[0] <= 64 and weight.nbytes <= 13 << 20 and out % 64 == 0 and inner % 256 == 0 and x.itemsize == 2


def few_rows_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x·weightᵀ + bias: x [rows, in], at most 64 rows → [rows, out]. See `serves_few_rows`."""
    rows, (out, inner) = x.shape[0], weight.shape
    # Tiles are chosen so that about as many programs run as there are multiprocessors. Tensor cores of Hopper multiply
    # 64 rows at once. Their instructions for 16 or 32 rows took 20 to 40 % longer on an H100.
    m = 64 if x.is_cuda and is_hopper(x.device) else max(16, triton.next_power_of_2(rows))
    tile, step = (16, 256) if out <= 2048 else (32, 256) if out <= 4096 else (64, 128)
    y = torch.empty((rows, out), dtype=x.dtype, device=x.device)
    few_rows_kernel[(out // tile,)](
        x, weight, bias, y, rows, out, inner, x.stride(0), HAS_BIAS=bias is not None,
        BLOCK_M=m, BLOCK_N=tile, BLOCK_K=step, num_warps=4, num_stages=4,
        **starts_early(x),
    )  # fmt: skip
    return y
