"""The experts' grouped matrix products in Triton.

Gale et al., MegaBlocks, 2022 (instead of padding all experts to the same number of rows). Each program gathers the rows
of a block of (token, choice) pairs and multiplies them with one expert's weights. ``pairs`` and ``owner`` are the
results of `minisgl.plugins.kernels.ops.align`. The first product (gate and up) includes the activation, the second one
(down) the router's weights.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl.plugins.kernels.ops.triton.activation import gated
from minisgl.plugins.kernels.ops.triton.early import start_next, starts_early, wait_for_previous


class Extras(NamedTuple):
    """What experts like those of gpt-oss also have: biases of both products, and the numbers of their activation."""

    up_bias: Tensor | None = None  # [experts, 2·inner]
    down_bias: Tensor | None = None  # [experts, hidden]
    alpha: float = 0.0  # of the activation "clamped"
    limit: float = 0.0


class Tiles(NamedTuple):
    """A tile: ``m`` pairs by ``n`` outputs, ``k`` inputs per iteration, with Triton's num_warps and num_stages."""

    m: int
    n: int
    k: int
    warps: int
    stages: int


@triton.jit
def up_kernel(
    x, gate_up, inner_out, pairs, owner, bias, n_pairs, stride_x, stride_expert, stride_row,
    TOP_K: tl.constexpr, HIDDEN: tl.constexpr, INNER: tl.constexpr, ACT: tl.constexpr,
    ALPHA: tl.constexpr, LIMIT: tl.constexpr, BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    """Compute inner_out[pair] = act(x[token] · gateᵀ) · (x[token] · upᵀ): two products over the same rows.

    With BIAS, ``bias`` [experts, 2 · INNER] is added. One program: one block of pairs, BLOCK_N columns.
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
        row = tl.where(n < INNER, n, 0)  # columns past INNER read column 0 and are not stored
        gate_at = gate_up + expert.to(tl.int64) * stride_expert + row[None, :] * stride_row + k[:, None]
        gate_sum = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        up_sum = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in range(0, HIDDEN, BLOCK_K):
            if HIDDEN % BLOCK_K == 0:
                rows = tl.load(x_at + start, mask=real[:, None], other=0.0)
                gates, ups = tl.load(gate_at + start), tl.load(gate_at + start + INNER * stride_row)
            else:
                inside = start + k < HIDDEN
                rows = tl.load(x_at + start, mask=real[:, None] & inside[None, :], other=0.0)
                gates = tl.load(gate_at + start, mask=inside[:, None], other=0.0)
                ups = tl.load(gate_at + start + INNER * stride_row, mask=inside[:, None], other=0.0)
            gate_sum = tl.dot(rows, gates, gate_sum, input_precision="ieee")
            up_sum = tl.dot(rows, ups, up_sum, input_precision="ieee")
        if BIAS:
            gate_sum += tl.load(bias + expert * 2 * INNER + row)[None, :]
            up_sum += tl.load(bias + expert * 2 * INNER + INNER + row)[None, :]
        out_at = inner_out + pair.to(tl.int64)[:, None] * INNER + n[None, :]
        merged = gated(gate_sum, up_sum, ACT, ALPHA, LIMIT).to(inner_out.dtype.element_ty)
        tl.store(out_at, merged, mask=real[:, None] & (n[None, :] < INNER))


@triton.jit
def down_kernel(
    inner, down, scale, out, pairs, owner, bias, n_pairs, stride_expert, stride_row,
    HIDDEN: tl.constexpr, INNER: tl.constexpr, BIAS: tl.constexpr,
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
        row = tl.where(n < HIDDEN, n, 0)
        down_at = down + expert.to(tl.int64) * stride_expert + row[None, :] * stride_row + k[:, None]
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in range(0, INNER, BLOCK_K):
            if INNER % BLOCK_K == 0:
                rows = tl.load(inner_at + start, mask=real[:, None], other=0.0)
                downs = tl.load(down_at + start)
            else:
                inside = start + k < INNER
                rows = tl.load(inner_at + start, mask=real[:, None] & inside[None, :], other=0.0)
                downs = tl.load(down_at + start, mask=inside[:, None], other=0.0)
            acc = tl.dot(rows, downs, acc, input_precision="ieee")
        if BIAS:
            acc += tl.load(bias + expert * HIDDEN + row)[None, :]
        weighted = acc * tl.load(scale + pair, mask=real, other=0.0)[:, None]
        out_at = out + pair.to(tl.int64)[:, None] * HIDDEN + n[None, :]
        tl.store(out_at, weighted.to(out.dtype.element_ty), mask=real[:, None] & (n[None, :] < HIDDEN))


@triton.jit
def sum_kernel(
    parts, ids, out, first, stride_out,
    TOP_K: tl.constexpr, EXPERTS: tl.constexpr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr = False,
):  # fmt: skip
    """Compute out[token], the sum of the rows of the token's pairs. One program: one token, BLOCK columns.

    The sum is in float32 and always in the order of choices. Pairs that chose an expert of another rank are skipped.
    """
    token, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if EARLY:
        start_next()
        wait_for_previous()
    total = tl.zeros([BLOCK], tl.float32)
    for choice in tl.static_range(TOP_K):
        expert = tl.load(ids + token * TOP_K + choice) - first
        width = tl.where((expert >= 0) & (expert < EXPERTS), HIDDEN, 0)
        part = tl.load(parts + (token * TOP_K + choice) * HIDDEN + i, mask=i < width, other=0.0)
        total += part.to(tl.float32)
    tl.store(out + token * stride_out + i, total.to(out.dtype.element_ty), mask=i < HIDDEN)


def up(
    x: Tensor, gate_up: Tensor, pairs: Tensor, owner: Tensor, top_k: int, act: str, tiles: Tiles,
    extras: Extras,
) -> Tensor:  # fmt: skip
    """Launch the first product: x [tokens, hidden], gate_up [experts, 2·inner, hidden] → [tokens · top_k, inner].

    Rows of pairs that chose an expert of another rank are left uninitialised. ``act`` is one of the names in
    `minisgl.plugins.kernels.ops.triton.activation.gated`.
    """
    hidden, inner, n = x.shape[1], gate_up.shape[1] // 2, x.shape[0] * top_k
    out = torch.empty((n, inner), dtype=x.dtype, device=x.device)
    up_kernel[(triton.cdiv(inner, tiles.n), len(owner))](
        x, gate_up, out, pairs, owner, extras.up_bias, n, x.stride(0), *gate_up.stride()[:2],
        TOP_K=top_k, HIDDEN=hidden, INNER=inner, ACT=act, ALPHA=extras.alpha, LIMIT=extras.limit,
        BIAS=extras.up_bias is not None, BLOCK_M=tiles.m, BLOCK_N=tiles.n, BLOCK_K=tiles.k,
        num_warps=tiles.warps, num_stages=tiles.stages,
        **starts_early(x),
    )  # fmt: skip
    return out


def down(
    inner: Tensor, weight: Tensor, scale: Tensor, pairs: Tensor, owner: Tensor, tiles: Tiles, extras: Extras
) -> Tensor:
    """Launch the second product: inner [pairs, inner], weight [experts, hidden, inner] → [pairs, hidden].

    Each row is multiplied by its pair's router weight, scale [tokens, top_k] float32.
    """
    n, hidden = inner.shape[0], weight.shape[1]
    out = torch.empty((n, hidden), dtype=inner.dtype, device=inner.device)
    down_kernel[(triton.cdiv(hidden, tiles.n), len(owner))](
        inner, weight, scale, out, pairs, owner, extras.down_bias, n, *weight.stride()[:2],
        HIDDEN=hidden, INNER=inner.shape[1], BIAS=extras.down_bias is not None,
        BLOCK_M=tiles.m, BLOCK_N=tiles.n, BLOCK_K=tiles.k, num_warps=tiles.warps, num_stages=tiles.stages,
        **starts_early(inner),
    )  # fmt: skip
    return out


def sum_pairs(parts: Tensor, ids: Tensor, first: int, experts: int, out: Tensor) -> Tensor:
    """Sum each token's rows of parts [tokens · top_k, hidden] into out [tokens, hidden], and return out."""
    (tokens, top_k), hidden = ids.shape, parts.shape[1]
    block = min(1024, triton.next_power_of_2(hidden))
    sum_kernel[(tokens, triton.cdiv(hidden, block))](
        parts, ids, out, first, out.stride(0), TOP_K=top_k, EXPERTS=experts, HIDDEN=hidden, BLOCK=block, num_warps=4,
        **starts_early(parts),
    )  # fmt: skip
    return out
