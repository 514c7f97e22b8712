"""The experts' grouped matrix products with weights in MXFP4, in Triton.

The products are those of `minisgl.plugins.kernels.ops.triton.moe`, and activations stay in 16 bits. A byte of a weight
has two numbers of 4 bits, the first in its lower half, and 32 numbers of a row share a scale, the byte of a power of
two. `tl.dot_scaled` converts a tile of them to 16 bits on a GPU without such products. Source: OCP Microscaling Formats
(MX) Specification 1.0, 2023.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl.plugins.kernels.ops.triton.activation import gated
from minisgl.plugins.kernels.ops.triton.device import device_function
from minisgl.plugins.kernels.ops.triton.early import start_next, starts_early, wait_for_previous
from minisgl.plugins.kernels.ops.triton.moe import Extras

__all__ = ["MxWeight", "block_of", "down", "up"]


class MxWeight(NamedTuple):
    """Matrices of experts: ``packed`` [experts, out, in / 2] and ``scales`` [experts, out, in / 32], both uint8."""

    packed: Tensor
    scales: Tensor


@device_function
def decoded(packed, scales, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the numbers [BLOCK_K, BLOCK_N] of ``packed`` [BLOCK_K / 2, BLOCK_N], ``scales`` [BLOCK_N, BLOCK_K / 32].

    For Triton's interpreter, which has no `tl.dot_scaled`.
    """
    codes = tl.join(packed & 15, packed >> 4).permute(0, 2, 1).reshape(BLOCK_K, BLOCK_N).to(tl.int32)
    exponent, mantissa = (codes & 7) >> 1, codes & 1
    halves = tl.where(exponent == 0, mantissa, (2 + mantissa) << tl.maximum(exponent - 1, 0))
    numbers = tl.where(codes >= 8, -0.5, 0.5) * halves.to(tl.float32)
    factors = tl.exp2(tl.trans(scales).to(tl.float32) - 127.0)
    factors = tl.broadcast_to(factors[:, None, :], [BLOCK_K // 32, 32, BLOCK_N]).reshape(BLOCK_K, BLOCK_N)
    return numbers * factors


@device_function
def add_product(
    total, rows, packed, scales, FORMAT: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr,
    SCALED: tl.constexpr,
):  # fmt: skip
    """Return total + rows·weight for rows [M, BLOCK_K] in 16 bits, and the tile of a weight: see `decoded`."""
    if SCALED:
        return tl.dot_scaled(rows, None, FORMAT, packed, scales, "e2m1", total, fast_math=True)
    return tl.dot(rows, decoded(packed, scales, BLOCK_K, BLOCK_N).to(rows.dtype), total)


@device_function
def load_tile(
    packed, scales, rows, start, IN: tl.constexpr, BLOCK_K: tl.constexpr, WHOLE: tl.constexpr
):  # fmt: skip
    """Load a tile of a weight: packed numbers [BLOCK_K / 2, N] and scales [N, BLOCK_K / 32], from column ``start`` on.

    ``rows`` [N] are numbers of rows of all experts. Numbers from column IN on are 0.
    """
    byte, group = tl.arange(0, BLOCK_K // 2), tl.arange(0, BLOCK_K // 32)
    packed_at = packed + rows[None, :] * (IN // 2) + start // 2 + byte[:, None]
    scales_at = scales + rows[:, None] * (IN // 32) + start // 32 + group[None, :]
    if WHOLE:
        return tl.load(packed_at), tl.load(scales_at)
    real = start // 2 + byte < IN // 2
    inside = start // 32 + group < IN // 32
    return tl.load(packed_at, mask=real[:, None], other=0), tl.load(scales_at, mask=inside[None, :], other=127)


@triton.jit(do_not_specialize=["n_pairs"])
def up_kernel(
    x, packed, scales, inner_out, pairs, owner, bias, n_pairs, stride_x,
    TOP_K: tl.constexpr, HIDDEN: tl.constexpr, INNER: tl.constexpr, ACT: tl.constexpr, ALPHA: tl.constexpr,
    LIMIT: tl.constexpr, BIAS: tl.constexpr, FORMAT: tl.constexpr, SCALED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    """Compute inner_out[pair] = act(x[token] · gateᵀ) · (x[token] · upᵀ).

    One program: one block of pairs, BLOCK_N columns. With BIAS, ``bias`` [experts, 2 · INNER] is added to the products.
    """
    block, column = tl.program_id(1), tl.program_id(0) * BLOCK_N
    if EARLY:
        start_next()
        wait_for_previous()
    expert = tl.load(owner + block)
    if expert >= 0:
        pair = tl.load(pairs + block * BLOCK_M + tl.arange(0, BLOCK_M))
        real = pair < n_pairs
        n, k = column + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
        x_at = x + (pair // TOP_K).to(tl.int64)[:, None] * stride_x + k[None, :]
        inside = tl.where(n < INNER, n, 0)  # columns past INNER read column 0 and are not stored
        row = expert.to(tl.int64) * 2 * INNER + inside
        whole: tl.constexpr = HIDDEN % BLOCK_K == 0
        gates, ups = tl.zeros([BLOCK_M, BLOCK_N], tl.float32), tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in range(0, HIDDEN, BLOCK_K):
            rows = tl.load(x_at + start, mask=real[:, None] & (start + k < HIDDEN)[None, :], other=0.0)
            gate_tile, gate_scales = load_tile(packed, scales, row, start, HIDDEN, BLOCK_K, whole)
            up_tile, up_scales = load_tile(packed, scales, row + INNER, start, HIDDEN, BLOCK_K, whole)
            gates = add_product(gates, rows, gate_tile, gate_scales, FORMAT, BLOCK_K, BLOCK_N, SCALED)
            ups = add_product(ups, rows, up_tile, up_scales, FORMAT, BLOCK_K, BLOCK_N, SCALED)
        if BIAS:
            gates += tl.load(bias + expert * 2 * INNER + inside)[None, :]
            ups += tl.load(bias + expert * 2 * INNER + INNER + inside)[None, :]
        merged = gated(gates, ups, ACT, ALPHA, LIMIT).to(inner_out.dtype.element_ty)
        out_at = inner_out + pair.to(tl.int64)[:, None] * INNER + n[None, :]
        tl.store(out_at, merged, mask=real[:, None] & (n[None, :] < INNER))


@triton.jit(do_not_specialize=["n_pairs"])
def down_kernel(
    inner, packed, scales, scale, out, pairs, owner, bias, n_pairs,
    HIDDEN: tl.constexpr, INNER: tl.constexpr, BIAS: tl.constexpr, FORMAT: tl.constexpr, SCALED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    """Compute out[pair] = scale[pair] · (inner[pair] · downᵀ). One program: one block of pairs, BLOCK_N columns.

    With BIAS, ``bias`` [experts, HIDDEN] is added to the product.
    """
    block, column = tl.program_id(1), tl.program_id(0) * BLOCK_N
    if EARLY:
        start_next()
        wait_for_previous()
    expert = tl.load(owner + block)
    if expert >= 0:
        pair = tl.load(pairs + block * BLOCK_M + tl.arange(0, BLOCK_M))
        real = pair < n_pairs
        n, k = column + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
        inner_at = inner + pair.to(tl.int64)[:, None] * INNER + k[None, :]
        inside = tl.where(n < HIDDEN, n, 0)
        row = expert.to(tl.int64) * HIDDEN + inside
        whole: tl.constexpr = INNER % BLOCK_K == 0
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in range(0, INNER, BLOCK_K):
            rows = tl.load(inner_at + start, mask=real[:, None] & (start + k < INNER)[None, :], other=0.0)
            tile, tile_scales = load_tile(packed, scales, row, start, INNER, BLOCK_K, whole)
            total = add_product(total, rows, tile, tile_scales, FORMAT, BLOCK_K, BLOCK_N, SCALED)
        if BIAS:
            total += tl.load(bias + expert * HIDDEN + inside)[None, :]
        weighted = total * tl.load(scale + pair, mask=real, other=0.0)[:, None]
        out_at = out + pair.to(tl.int64)[:, None] * HIDDEN + n[None, :]
        tl.store(out_at, weighted.to(out.dtype.element_ty), mask=real[:, None] & (n[None, :] < HIDDEN))


def block_of(pairs: int, experts: int) -> int:
    """Return how many pairs a program computes, for ``pairs`` pairs over ``experts`` experts."""
    return 16 if pairs <= 16 * experts else 32 if pairs <= 32 * experts else 64 if pairs <= 96 * experts else 128


def _launch(x: Tensor, columns: int, block: int) -> dict[str, object]:
    formats = {torch.bfloat16: "bf16", torch.float16: "fp16"}
    return {
        "FORMAT": formats[x.dtype], "SCALED": not triton.knobs.runtime.interpret,
        "BLOCK_M": block, "BLOCK_N": 64, "BLOCK_K": 128 if columns % 128 == 0 else 64,
        "num_warps": 4 if block < 128 else 8, "num_stages": 3, **starts_early(x),
    }  # fmt: skip


def up(x: Tensor, gate_up: MxWeight, pairs: Tensor, owner: Tensor, top_k: int, act: str, extras: Extras) -> Tensor:
    """Launch the first product: x [tokens, hidden], gate_up [experts, 2·inner, hidden] → [tokens · top_k, inner].

    See `minisgl.plugins.kernels.ops.triton.moe.up`.
    """
    hidden, inner, n = x.shape[1], gate_up.packed.shape[1] // 2, len(x) * top_k
    out = torch.empty((n, inner), dtype=x.dtype, device=x.device)
    up_kernel[(triton.cdiv(inner, 64), len(owner))](
        x, *gate_up, out, pairs, owner, extras.up_bias, n, x.stride(0), TOP_K=top_k, HIDDEN=hidden, INNER=inner,
        ACT=act, ALPHA=extras.alpha, LIMIT=extras.limit, BIAS=extras.up_bias is not None,
        **_launch(x, hidden, len(pairs) // len(owner)),
    )  # fmt: skip
    return out


def down(inner: Tensor, weight: MxWeight, scale: Tensor, pairs: Tensor, owner: Tensor, extras: Extras) -> Tensor:
    """Launch the second product: inner [pairs, inner], weight [experts, hidden, inner] → [pairs, hidden].

    See `minisgl.plugins.kernels.ops.triton.moe.down`.
    """
    n, hidden = inner.shape[0], weight.packed.shape[1]
    out = torch.empty((n, hidden), dtype=inner.dtype, device=inner.device)
    down_kernel[(triton.cdiv(hidden, 64), len(owner))](
        inner, *weight, scale, out, pairs, owner, extras.down_bias, n, HIDDEN=hidden, INNER=inner.shape[1],
        BIAS=extras.down_bias is not None, **_launch(inner, inner.shape[1], len(pairs) // len(owner)),
    )  # fmt: skip
    return out
