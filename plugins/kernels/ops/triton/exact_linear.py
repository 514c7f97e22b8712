"""Matrix products in Triton whose rows have the same bits in a batch of any size: ``exact=true`` on a GPU.

The inputs of a weight are cut into segments. A segment is added up `Tile.k` inputs at a time; then the sums of the
segments are added up in order. The cut depends only on the number of inputs and on the dtype. The number of rows
decides only where segments are computed: all in one program, or each in a program of its own, with a second launch that
adds up their sums. Both do the same additions. So a decode step with a small weight keeps all multiprocessors busy, and
a long chunk writes no partial sums.

A row-parallel product is computed in two halves of its inputs. Each is rounded to the model's dtype, as with two ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl.plugins.kernels.ops.triton.device import device_function, multiprocessors
from minisgl.plugins.kernels.ops.triton.early import start_next, starts_early, wait_for_previous

__all__ = ["linear", "segments", "tile_of"]

TALL = 512
"""With more rows than this, a program computes two tiles of 64 rows, to read each weight half as often."""


@device_function
def segment(
    x_at, weight_at, inside_m, inside_n, begin, IN, steps,
    EVEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Return the sum over ``steps`` blocks of inputs from ``begin`` on, float32 [BLOCK_M, BLOCK_N].

    ``steps`` is not a constant, so that the compiler can't merge the last addition with the caller's.
    """
    k = tl.arange(0, BLOCK_K)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in range(0, steps):
        start = begin + step * BLOCK_K
        if EVEN:
            a = tl.load(x_at + start, mask=inside_m[:, None], other=0.0)
            b = tl.load(weight_at + start, mask=inside_n[None, :], other=0.0)
        else:
            a = tl.load(x_at + start, mask=inside_m[:, None] & (start + k < IN)[None, :], other=0.0)
            b = tl.load(weight_at + start, mask=inside_n[None, :] & (start + k < IN)[:, None], other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=["rows", "steps"])
def product_kernel(
    x, weight, bias, y, partial, rows, OUT, IN, steps, stride_x, stride_weight,
    HALVES: tl.constexpr, SEGMENTS: tl.constexpr, SPLIT: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    EARLY: tl.constexpr = False,
):  # fmt: skip
    """Multiply one tile. One program: BLOCK_M rows, BLOCK_N outputs, and with SPLIT one segment of one half.

    ``IN`` is the number of inputs of a half. With SPLIT, ``partial`` [halves · segments, rows, OUT] gets the sums of
    the segments, which `sum_kernel` adds up; else ``y`` gets the result.
    """
    # GROUP_M tiles of rows take the same outputs one after another, so that weights and rows stay in the L2 cache.
    tiles_m, tiles_n = tl.cdiv(rows, BLOCK_M), tl.cdiv(OUT, BLOCK_N)
    group = tl.program_id(0) // (GROUP_M * tiles_n)
    in_group = tl.minimum(tiles_m - group * GROUP_M, GROUP_M)
    within = tl.program_id(0) % (GROUP_M * tiles_n)
    m = (group * GROUP_M + within % in_group) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = (within // in_group) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    inside_m, inside_n = m < rows, n < OUT
    if EARLY:
        start_next()
        wait_for_previous()
    x_at = x + m[:, None].to(tl.int64) * stride_x + k[None, :]
    weight_at = weight + n[None, :].to(tl.int64) * stride_weight + k[:, None]
    at = m[:, None].to(tl.int64) * OUT + n[None, :]
    inside = inside_m[:, None] & inside_n[None, :]
    if SPLIT:
        piece = tl.program_id(1)
        half = piece // SEGMENTS
        begin = (piece % SEGMENTS) * steps * BLOCK_K
        acc = segment(
            x_at + half * IN, weight_at + half * IN, inside_m, inside_n, begin, IN, steps,
            EVEN, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        tl.store(partial + piece.to(tl.int64) * rows * OUT + at, acc, mask=inside)
    else:
        first = tl.zeros([BLOCK_M, BLOCK_N], y.dtype.element_ty)
        for half in tl.static_range(HALVES):
            total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for number in range(0, SEGMENTS):
                total += segment(
                    x_at + half * IN, weight_at + half * IN, inside_m, inside_n, number * steps * BLOCK_K, IN, steps,
                    EVEN, BLOCK_M, BLOCK_N, BLOCK_K,
                )  # fmt: skip
            if HAS_BIAS and half == 0:
                total += tl.load(bias + n, mask=inside_n, other=0.0).to(tl.float32)[None, :]
            value = total.to(y.dtype.element_ty)
            first = value if half == 0 else (first.to(tl.float32) + value.to(tl.float32)).to(y.dtype.element_ty)
        tl.store(y + at, first, mask=inside)


@triton.jit(do_not_specialize=["rows"])
def sum_kernel(
    partial, bias, y, rows, OUT, HALVES: tl.constexpr, SEGMENTS: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    """Add up the segments that `product_kernel` wrote. One program: BLOCK outputs of one row."""
    row, n = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = n < OUT
    if EARLY:
        start_next()
        wait_for_previous()
    first = tl.zeros([BLOCK], y.dtype.element_ty)
    for half in tl.static_range(HALVES):
        total = tl.zeros([BLOCK], tl.float32)
        for number in tl.static_range(SEGMENTS):
            at = partial + ((half * SEGMENTS + number) * rows + row) * OUT + n
            total += tl.load(at, mask=inside, other=0.0)
        if HAS_BIAS and half == 0:
            total += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)
        value = total.to(y.dtype.element_ty)
        first = value if half == 0 else (first.to(tl.float32) + value.to(tl.float32)).to(y.dtype.element_ty)
    tl.store(y + row * OUT + n, first, mask=inside)


class Tile(NamedTuple):
    """A tile of ``m`` rows by ``n`` outputs, ``k`` inputs at a time, with Triton's num_warps and num_stages."""

    m: int
    n: int
    k: int
    warps: int
    stages: int


def tile_of(dtype: torch.dtype, rows: int = 1) -> Tile:
    """Return the tile for a dtype. Tensor cores multiply 64 rows at a time in each tile, tall or not."""
    if dtype == torch.float32:  # no tensor cores: few inputs at a time, or registers spill
        return Tile(64, 64, 16, 8, 2)
    return Tile(128, 64, 64, 8, 4) if rows > TALL else Tile(64, 64, 64, 4, 5)


def segments(inputs: int, dtype: torch.dtype) -> int:
    """Return the number of segments of ``inputs`` inputs: at most 4, of 512 inputs or more, of equal size if possible.

    Nothing else may decide it: the weight of a rank has fewer outputs, and the same sums.
    """
    steps, most = triton.cdiv(inputs, tile_of(dtype).k), max(1, min(4, inputs // 512))
    return next((count for count in range(most, 1, -1) if steps % count == 0), 1)


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, halves: int = 1, *, split: bool | None = None
) -> Tensor:
    """Return x·weightᵀ + bias: x [rows, in], weight [out, in] → [rows, out]; columns of x and weight are contiguous.

    With ``halves`` 2, the result is the sum of two products, one for each half of the inputs, rounded to x's dtype
    each; the bias belongs to the first. ``split`` decides whether segments are computed in programs of their own, which
    changes no bit. None: if the tiles alone are fewer than the multiprocessors.
    """
    (rows, inputs), out = x.shape, len(weight)
    y = torch.empty((rows, out), dtype=x.dtype, device=x.device)
    if not rows:
        return y
    inputs //= halves
    tile, pieces = tile_of(x.dtype, rows), segments(inputs, x.dtype)
    steps = triton.cdiv(triton.cdiv(inputs, tile.k), pieces)
    tiles = triton.cdiv(rows, tile.m) * triton.cdiv(out, tile.n)
    if split is None:
        split = tiles < (multiprocessors(x.device) if x.is_cuda else 1) and pieces * halves > 1
    partial = torch.empty((pieces * halves, rows, out), dtype=torch.float32, device=x.device) if split else y
    early = starts_early(x)
    product_kernel[(tiles, pieces * halves if split else 1)](
        x, weight, bias, y, partial, rows, out, inputs, steps, x.stride(0), weight.stride(0),
        HALVES=halves, SEGMENTS=pieces, SPLIT=split, HAS_BIAS=bias is not None,
        EVEN=inputs == pieces * steps * tile.k, BLOCK_M=tile.m, BLOCK_N=tile.n, BLOCK_K=tile.k, GROUP_M=16,
        num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=False, **early,
    )  # fmt: skip
    if split:
        block = min(1024, triton.next_power_of_2(out))
        sum_kernel[(rows, triton.cdiv(out, block))](
            partial, bias, y, rows, out, HALVES=halves, SEGMENTS=pieces, HAS_BIAS=bias is not None, BLOCK=block,
            num_warps=4, enable_fp_fusion=False, **early,
        )  # fmt: skip
    return y
