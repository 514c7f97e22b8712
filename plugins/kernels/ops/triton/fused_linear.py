"""Matrix products of a decoder layer for up to 256 rows, each fused with the norm, addition or activation beside it.

RMSNorm multiplies each column by a weight, and divides each row by its root mean square. Two products share this work,
so that the norm needs no launch. The product before the norm writes the residual stream times the norm's weight, and
sums of squares of the residual stream. The product after the norm multiplies, and then divides its result by the root
mean square. `minisgl.plugins.kernels.ops.fused_linear` has the torch references.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl.plugins.kernels.ops.fused_linear import ResidualStream
from minisgl.plugins.kernels.ops.triton.activation import gate
from minisgl.plugins.kernels.ops.triton.early import start_next, starts_early, wait_for_previous


@triton.jit(do_not_specialize=["rows"])
def normed_linear_kernel(
    x, squares, weight, bias, y, rows, eps,
    OUT: tl.constexpr, IN: tl.constexpr, PARTS: tl.constexpr, HAS_BIAS: tl.constexpr, ACT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_P: tl.constexpr,
    EARLY: tl.constexpr = False,
):  # fmt: skip
    """Compute y = x·weightᵀ / rms + bias; with ACT, y = act(gate)·up. One program: BLOCK_M rows, BLOCK_N outputs.

    rms² is the sum of a row's PARTS ``squares`` / IN + eps; rms is 1 if PARTS is 0. With ACT, weight is [2·OUT, IN],
    gate rows first. OUT is a multiple of BLOCK_N, and IN of BLOCK_K.
    """
    m, n = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M), tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k, part = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_P)
    real = m < rows
    if HAS_BIAS:
        shift = tl.load(bias + n).to(tl.float32)[None, :]
    if HAS_BIAS and ACT is not None:
        up_shift = tl.load(bias + OUT + n).to(tl.float32)[None, :]
    if EARLY:
        start_next()
        wait_for_previous()
    if PARTS > 0:  # loaded before the products, so that no program waits for memory after them
        inside = (part < PARTS)[:, None] & real[None, :]
        parts = tl.load(squares + part[:, None] * rows + m[None, :], mask=inside, other=0.0)
    x_at = x + m[:, None].to(tl.int64) * IN + k[None, :]
    weight_at = weight + n[None, :].to(tl.int64) * IN + k[:, None]
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, IN, BLOCK_K):
        a = tl.load(x_at + start, mask=real[:, None], other=0.0)
        total = tl.dot(a, tl.load(weight_at + start), total, input_precision="ieee")
        if ACT is not None:
            up = tl.dot(a, tl.load(weight_at + OUT * IN + start), up, input_precision="ieee")
    if PARTS > 0:
        scale = tl.rsqrt(tl.sum(parts, 0) / IN + eps)[:, None]
        total *= scale
        up *= scale
    if HAS_BIAS:
        total += shift
    if ACT is not None:
        if HAS_BIAS:
            up += up_shift
        total = gate(total, ACT) * up
    tl.store(y + m[:, None].to(tl.int64) * OUT + n[None, :], total.to(y.dtype.element_ty), mask=real[:, None])


@triton.jit(do_not_specialize=["rows"])
def add_linear_kernel(
    x, weight, bias, residual, norm_weight, y, scaled, squares, rows,
    OUT: tl.constexpr, IN: tl.constexpr, HAS_BIAS: tl.constexpr, NORM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    """Compute y = residual + x·weightᵀ + bias; with NORM also scaled = y·norm_weight, and squares, sums of y².

    One program: BLOCK_M rows, BLOCK_N outputs, which are one part of ``squares``. OUT is a multiple of BLOCK_N, and IN
    of BLOCK_K.
    """
    m, n = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M), tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    real = (m < rows)[:, None]
    if HAS_BIAS:
        shift = tl.load(bias + n).to(tl.float32)[None, :]
    if NORM:
        by = tl.load(norm_weight + n).to(tl.float32)[None, :]
    if EARLY:
        start_next()
        wait_for_previous()
    out_at = m[:, None].to(tl.int64) * OUT + n[None, :]
    added = tl.load(residual + out_at, mask=real, other=0.0)
    x_at = x + m[:, None].to(tl.int64) * IN + k[None, :]
    weight_at = weight + n[None, :].to(tl.int64) * IN + k[:, None]
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, IN, BLOCK_K):
        a = tl.load(x_at + start, mask=real, other=0.0)
        total = tl.dot(a, tl.load(weight_at + start), total, input_precision="ieee")
    if HAS_BIAS:
        total += shift
    stored = (total + added.to(tl.float32)).to(y.dtype.element_ty)
    tl.store(y + out_at, stored, mask=real)
    if NORM:
        wide = stored.to(tl.float32)  # the norm sees the rounded sum, which is the residual stream
        tl.store(scaled + out_at, (wide * by).to(scaled.dtype.element_ty), mask=real)
        tl.store(squares + tl.program_id(1) * rows + m, tl.sum(wide * wide, 1), mask=m < rows)


class Tile(NamedTuple):
    """A tile of ``m`` rows by ``n`` outputs, ``k`` inputs per iteration, with Triton's num_warps and num_stages."""

    m: int
    n: int
    k: int
    warps: int
    stages: int


Tiles = tuple[tuple[int, Tile], ...]
"""Pairs of the most rows for which a tile is used, and the tile.

A tile has 64 rows even if a step has fewer: tensor cores of Hopper multiply 64 rows at once, and products with 16 or 32
rows by other instructions took longer on an H100.
"""

NORMED: Tiles = ((64, Tile(64, 32, 256, 4, 4)), (128, Tile(64, 64, 128, 4, 4)), (256, Tile(128, 64, 128, 8, 4)))
GATED: Tiles = ((64, Tile(64, 32, 128, 4, 4)), (128, Tile(64, 64, 128, 4, 4)), (256, Tile(128, 64, 128, 8, 3)))
ADDED: Tiles = ((128, Tile(64, 16, 256, 4, 4)), (256, Tile(64, 32, 256, 4, 4)))

MAX_ROWS = 256
"""The most rows that `add_linear` and `normed_linear` support."""
MAX_BYTES = 64 << 20
"""Weights of more bytes are not served. Two weights of 24 MiB and one of 48 MiB in each layer were measured."""


def serves(dtype: torch.dtype, weight: Tensor) -> bool:
    """Return whether `normed_linear` and `add_linear` support ``weight``, [out, in] or [2·out, in], and ``dtype``.

    Only bfloat16 is supported: the residual stream times the norm's weight could exceed the range of float16.
    """
    out, inner = weight.shape
    return (
        weight.is_contiguous()
        and weight.dtype == dtype == torch.bfloat16
        and out % 128 == inner % 256 == 0
        and weight.nbytes <= MAX_BYTES
    )


def normed_linear(
    x: Tensor, squares: Tensor | None, eps: float, weight: Tensor, bias: Tensor | None = None, act: str | None = None
) -> Tensor:
    """Compute `minisgl.plugins.kernels.ops.fused_linear.normed_linear_torch` up to `MAX_ROWS` rows. See `serves`."""
    (rows, inner), out = x.shape, weight.shape[0] // (1 if act is None else 2)
    tile, parts = _tile(NORMED if act is None else GATED, rows), 0 if squares is None else len(squares)
    y = torch.empty((rows, out), dtype=x.dtype, device=x.device)
    normed_linear_kernel[(triton.cdiv(rows, tile.m), out // tile.n)](
        x, squares, weight, bias, y, rows, eps,
        OUT=out, IN=inner, PARTS=parts, HAS_BIAS=bias is not None, ACT=act,
        BLOCK_M=tile.m, BLOCK_N=tile.n, BLOCK_K=tile.k, BLOCK_P=triton.next_power_of_2(max(1, parts)),
        num_warps=tile.warps, num_stages=tile.stages, **starts_early(x),
    )  # fmt: skip
    return y


def add_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, norm_weight: Tensor | None
) -> ResidualStream:
    """Compute `minisgl.plugins.kernels.ops.fused_linear.add_linear_torch` for up to `MAX_ROWS` rows. See `serves`."""
    (rows, inner), out = x.shape, weight.shape[0]
    tile = _tile(ADDED, rows)
    y = torch.empty((rows, out), dtype=x.dtype, device=x.device)
    scaled, squares = y, None
    if norm_weight is not None:
        scaled = torch.empty_like(y)
        squares = torch.empty((out // tile.n, rows), dtype=torch.float32, device=x.device)
    add_linear_kernel[(triton.cdiv(rows, tile.m), out // tile.n)](
        x, weight, bias, residual, norm_weight, y, scaled, squares, rows,
        OUT=out, IN=inner, HAS_BIAS=bias is not None, NORM=norm_weight is not None,
        BLOCK_M=tile.m, BLOCK_N=tile.n, BLOCK_K=tile.k, num_warps=tile.warps, num_stages=tile.stages,
        **starts_early(x),
    )  # fmt: skip
    return ResidualStream(y, scaled, squares)


def _tile(tiles: Tiles, rows: int) -> Tile:
    return next(tile for most, tile in tiles if rows <= most)
