"""Products with FP8 weights in Triton: weight-only for few rows, and e4m3 times e4m3 for many rows.

A few rows are limited by the bytes of the weight. So activations stay in their dtype (weight-only), which saves the
launch that would quantise them. Many rows are limited by arithmetic, which in e4m3 is twice as fast as in 16 bits; the
sum over each 128 columns is scaled and added up in float32. `minisgl.kernel.fp8` has the layout and the torch
reference.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernel.fp8 import BLOCK, E4M3, Fp8Weight, blocks
from minisgl.kernel.triton.early import start_next, starts_early, wait_for_previous

GROUP = tl.constexpr(BLOCK)
LARGEST = tl.constexpr(448.0)

MAX_FEW_ROWS = 64
"""The most rows that `few_rows` multiplies."""


@triton.jit
def one_row_kernel(
    x, weight, scale_inv, y, OUT, IN, EVEN: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    EARLY: tl.constexpr = False,
):  # fmt: skip
    """Compute ``ROWS`` outputs of a product with one row of x. One program: ``ROWS`` rows of the weight.

    ROWS divides 128, so a program's weights have one scale for each 128 columns, which scales x.
    """
    row, col = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLS)
    inside = (row < OUT)[:, None]
    weight += row[:, None].to(tl.int64) * IN + col[None, :]
    scale_inv += (tl.program_id(0) * ROWS // GROUP) * tl.cdiv(IN, GROUP)
    ahead = tl.load(weight, mask=inside if EVEN else inside & (col < IN)[None, :], other=0.0)
    if EARLY:
        start_next()
        wait_for_previous()
    total = tl.zeros([ROWS, COLS], tl.float32)
    for start in range(0, IN, COLS):
        b = ahead
        ahead = tl.load(weight + start + COLS, mask=inside & (start + COLS + col < IN)[None, :], other=0.0)
        real = start + col < IN
        scale = tl.load(scale_inv + (start + col) // GROUP, mask=real, other=0.0)
        a = tl.load(x + start + col, mask=real, other=0.0).to(tl.float32) * scale
        total += b.to(tl.float32) * a[None, :]
    tl.store(y + row, tl.sum(total, axis=1).to(y.dtype.element_ty), mask=row < OUT)


def one_row(x: Tensor, weight: Fp8Weight) -> Tensor:
    """Return x·weightᵀ for one row: x [1, in] → [1, out]. Weight-only."""
    rows, cols = weight.values.shape
    tile, step, warps = (4, 1024, 4) if rows <= 8192 else (8, 1024, 4)
    step = min(step, triton.next_power_of_2(cols))
    y = torch.empty((1, rows), dtype=x.dtype, device=x.device)
    one_row_kernel[(triton.cdiv(rows, tile),)](
        x, weight.values, weight.scale_inv, y, rows, cols, EVEN=cols % step == 0, ROWS=tile, COLS=step,
        num_warps=warps, **starts_early(x),
    )  # fmt: skip
    return y


@triton.jit(do_not_specialize=["rows"])
def few_rows_kernel(
    x, weight, scale_inv, y, rows, OUT, IN, stride_x,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    """Compute ``BLOCK_N`` outputs for all rows of x. One program: ``BLOCK_N`` rows of the weight.

    BLOCK_N divides 128. The weight is converted to x's dtype, which has every number of e4m3.
    """
    m, n, k = tl.arange(0, BLOCK_M), tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, GROUP)
    if EARLY:
        start_next()
        wait_for_previous()
    x_at = x + m[:, None] * stride_x + k[None, :]
    weight_at = weight + n[None, :].to(tl.int64) * IN + k[:, None]
    scale_inv += (tl.program_id(0) * BLOCK_N // GROUP) * tl.cdiv(IN, GROUP)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, IN, GROUP):
        real = start + k < IN
        a = tl.load(x_at + start, mask=(m[:, None] < rows) & real[None, :], other=0.0)
        b = tl.load(weight_at + start, mask=real[:, None] & (n[None, :] < OUT), other=0.0)
        total += tl.dot(a, b.to(a.dtype), input_precision="ieee") * tl.load(scale_inv + start // GROUP)
    inside = (m[:, None] < rows) & (n[None, :] < OUT)
    tl.store(y + m[:, None] * OUT + n[None, :], total.to(y.dtype.element_ty), mask=inside)


def few_rows(x: Tensor, weight: Fp8Weight) -> Tensor:
    """Return x·weightᵀ [rows, out] for x [rows, in] with at most `MAX_FEW_ROWS` rows. Weight-only."""
    rows, (out, inner) = x.shape[0], weight.values.shape
    tile = 32 if out <= 8192 else 64
    y = torch.empty((rows, out), dtype=x.dtype, device=x.device)
    few_rows_kernel[(triton.cdiv(out, tile),)](
        x, weight.values, weight.scale_inv, y, rows, out, inner, x.stride(0),
        BLOCK_M=max(16, triton.next_power_of_2(rows)), BLOCK_N=tile, num_warps=4,
        num_stages=2 if x.itemsize == 4 else 4, **starts_early(x),
    )  # fmt: skip
    return y


@triton.jit
def quantize_rows_kernel(x, values, factors, IN, stride_x, GROUPS: tl.constexpr, EARLY: tl.constexpr = False):
    """Quantise ``GROUPS`` groups of 128 columns of one row."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    col = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    if EARLY:
        start_next()
        wait_for_previous()
    a = tl.load(x + row * stride_x + col, mask=col < IN, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(a), 1)
    scale = tl.div_rn(tl.full([GROUPS], LARGEST, tl.float32), tl.where(largest > 0, largest, LARGEST))
    scaled = tl.clamp(a * scale[:, None], -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    tl.store(values + row * IN + col, scaled.to(values.dtype.element_ty), mask=col < IN)
    count = tl.cdiv(IN, GROUP)
    inverse = tl.div_rn(tl.full([GROUPS], 1.0, tl.float32), scale)
    tl.store(factors + row * count + group, inverse, mask=group < count)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `minisgl.kernel.fp8.quantize_rows` of x [rows, in]: e4m3 values [rows, in], factors [rows, groups]."""
    rows, inner = x.shape
    count = blocks(inner)
    values = torch.empty((rows, inner), dtype=E4M3, device=x.device)
    factors = torch.empty((rows, count), dtype=torch.float32, device=x.device)
    groups = min(8, triton.next_power_of_2(count))
    quantize_rows_kernel[(rows, triton.cdiv(count, groups))](
        x, values, factors, inner, x.stride(0), GROUPS=groups, num_warps=4, **starts_early(x)
    )
    return values, factors


@triton.jit(do_not_specialize=["rows"])
def many_rows_kernel(
    x, factors, weight, scale_inv, y, rows, OUT, IN,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BANDS: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    """Compute a tile [BLOCK_M, BLOCK_N] of the product of quantised rows. BLOCK_N divides 128.

    Programs run over BANDS tiles of rows before they go to the next tile of columns, so that the weights they read are
    in the cache.
    """
    tiles_m, tiles_n = tl.cdiv(rows, BLOCK_M), tl.cdiv(OUT, BLOCK_N)
    band, place = tl.program_id(0) // (BANDS * tiles_n), tl.program_id(0) % (BANDS * tiles_n)
    height = tl.minimum(tiles_m - band * BANDS, BANDS)
    tile_m, tile_n = band * BANDS + place % height, place // height
    m, n = tile_m * BLOCK_M + tl.arange(0, BLOCK_M), tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, GROUP)
    if EARLY:
        start_next()
        wait_for_previous()
    x_at = x + m[:, None].to(tl.int64) * IN + k[None, :]
    weight_at = weight + n[None, :].to(tl.int64) * IN + k[:, None]
    factors += m * tl.cdiv(IN, GROUP)
    scale_inv += (tile_n * BLOCK_N // GROUP) * tl.cdiv(IN, GROUP)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, IN, GROUP):
        real = start + k < IN
        a = tl.load(x_at + start, mask=(m[:, None] < rows) & real[None, :], other=0.0)
        b = tl.load(weight_at + start, mask=real[:, None] & (n[None, :] < OUT), other=0.0)
        scale = tl.load(factors + start // GROUP, mask=m < rows, other=0.0) * tl.load(scale_inv + start // GROUP)
        total += tl.dot(a, b) * scale[:, None]
    inside = (m[:, None] < rows) & (n[None, :] < OUT)
    tl.store(y + m[:, None].to(tl.int64) * OUT + n[None, :], total.to(y.dtype.element_ty), mask=inside)


def many_rows(x: Tensor, weight: Fp8Weight) -> Tensor:
    """Return x·weightᵀ [rows, out] for x [rows, in], quantised in groups of 128 columns, in two launches."""
    return product(*quantize_rows(x), weight, x.dtype)


def product(values: Tensor, factors: Tensor, weight: Fp8Weight, dtype: torch.dtype) -> Tensor:
    """Return the product [rows, out], in ``dtype``, of rows that `quantize_rows` quantised with a weight."""
    (rows, inner), out = values.shape, weight.values.shape[0]
    y = torch.empty((rows, out), dtype=dtype, device=values.device)
    block_m, block_n = (64, 128) if rows > 32 else (32, 64)
    grid = (triton.cdiv(rows, block_m) * triton.cdiv(out, block_n),)
    many_rows_kernel[grid](
        values, factors, weight.values, weight.scale_inv, y, rows, out, inner,
        BLOCK_M=block_m, BLOCK_N=block_n, BANDS=16, num_warps=4, num_stages=4, **starts_early(values),
    )  # fmt: skip
    return y
