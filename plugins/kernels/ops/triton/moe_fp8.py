"""The experts' grouped matrix products in FP8, in Triton: e4m3 times e4m3, with a scale for each block.

The products are those of `minisgl.plugins.kernels.ops.triton.moe`. Rows are quantised in groups of 128 columns, weights
in blocks of 128 × 128 (`minisgl.plugins.kernels.ops.fp8`): the sum over each 128 columns is scaled and added up in
float32. A program of the first product computes 128 columns, which are one group of its result, and so quantises it.
DeepSeek-AI, DeepSeek-V3 Technical Report, 2024, section 3.3.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl.plugins.kernels.ops.fp8 import BLOCK, E4M3, Fp8Weight, QuantizedRows
from minisgl.plugins.kernels.ops.triton.activation import gated
from minisgl.plugins.kernels.ops.triton.early import start_next, starts_early, wait_for_previous
from minisgl.plugins.kernels.ops.triton.quantize import GROUP, LARGEST, quantize_rows

__all__ = ["block_of", "down", "quantize_rows", "up"]


@triton.jit(do_not_specialize=["n_pairs"])
def up_kernel(
    x, factors, gate_up, scale_inv, inner, inner_factors, pairs, owner, n_pairs, stride_factors, stride_inner_factors,
    TOP_K: tl.constexpr, HIDDEN: tl.constexpr, INNER: tl.constexpr, ACT: tl.constexpr, DTYPE: tl.constexpr,
    BLOCK_M: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    """Compute inner[i] = act(x[token] · gateᵀ) · (x[token] · upᵀ) for the sorted pair i, which belongs to token.

    The result is rounded to DTYPE and then quantised. One program: one block of pairs, 128 columns.
    """
    block, column = tl.program_id(1), tl.program_id(0)
    if EARLY:
        start_next()
        wait_for_previous()
    expert = tl.load(owner + block)
    if expert >= 0:
        i = block * BLOCK_M + tl.arange(0, BLOCK_M)
        pair = tl.load(pairs + i)
        real = pair < n_pairs
        token = tl.where(real, pair // TOP_K, 0)
        n, k = tl.arange(0, GROUP), tl.arange(0, GROUP)
        x_at = x + token.to(tl.int64)[:, None] * HIDDEN + k[None, :]
        row = expert.to(tl.int64) * 2 * INNER + column * GROUP
        gate_at = gate_up + (row + n[None, :]) * HIDDEN + k[:, None]
        gate_scale = scale_inv + row // GROUP * (HIDDEN // GROUP)
        up_scale = gate_scale + INNER // GROUP * (HIDDEN // GROUP)
        gates, ups = tl.zeros([BLOCK_M, GROUP], tl.float32), tl.zeros([BLOCK_M, GROUP], tl.float32)
        for g in range(0, HIDDEN // GROUP):
            rows = tl.load(x_at + g * GROUP, mask=real[:, None], other=0.0)
            factor = tl.load(factors + g * stride_factors + token, mask=real, other=0.0)
            gate_tile = tl.load(gate_at + g * GROUP)
            up_tile = tl.load(gate_at + g * GROUP + INNER * HIDDEN)
            gates += tl.dot(rows, gate_tile) * (factor * tl.load(gate_scale + g))[:, None]
            ups += tl.dot(rows, up_tile) * (factor * tl.load(up_scale + g))[:, None]
        merged = gated(gates, ups, ACT, 0.0, 0.0).to(DTYPE).to(tl.float32)
        largest = tl.max(tl.abs(merged), 1)
        to_e4m3 = tl.div_rn(tl.full([BLOCK_M], LARGEST, tl.float32), tl.where(largest > 0, largest, LARGEST))
        scaled = tl.clamp(merged * to_e4m3[:, None], -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
        at = inner + i.to(tl.int64)[:, None] * INNER + column * GROUP + n[None, :]
        tl.store(at, scaled.to(inner.dtype.element_ty), mask=real[:, None])
        inverse = tl.div_rn(tl.full([BLOCK_M], 1.0, tl.float32), to_e4m3)
        tl.store(inner_factors + column.to(tl.int64) * stride_inner_factors + i, inverse, mask=real)


@triton.jit(do_not_specialize=["n_pairs"])
def down_kernel(
    inner, factors, down, scale_inv, scale, out, pairs, owner, n_pairs, stride_factors,
    HIDDEN: tl.constexpr, INNER: tl.constexpr, BLOCK_M: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    """Compute out[pair] = scale[pair] · (inner[i] · downᵀ) for the sorted pair i.

    One program: one block of pairs, 128 columns.
    """
    block, column = tl.program_id(1), tl.program_id(0)
    if EARLY:
        start_next()
        wait_for_previous()
    expert = tl.load(owner + block)
    if expert >= 0:
        i = block * BLOCK_M + tl.arange(0, BLOCK_M)
        pair = tl.load(pairs + i)
        real = pair < n_pairs
        n, k = tl.arange(0, GROUP), tl.arange(0, GROUP)
        inner_at = inner + i.to(tl.int64)[:, None] * INNER + k[None, :]
        row = expert.to(tl.int64) * HIDDEN + column * GROUP
        down_at = down + (row + n[None, :]) * INNER + k[:, None]
        scale_inv += row // GROUP * (INNER // GROUP)
        total = tl.zeros([BLOCK_M, GROUP], tl.float32)
        for g in range(0, INNER // GROUP):
            rows = tl.load(inner_at + g * GROUP, mask=real[:, None], other=0.0)
            factor = tl.load(factors + g * stride_factors + i, mask=real, other=0.0)
            total += tl.dot(rows, tl.load(down_at + g * GROUP)) * (factor * tl.load(scale_inv + g))[:, None]
        weighted = total * tl.load(scale + pair, mask=real, other=0.0)[:, None]
        at = out + pair.to(tl.int64)[:, None] * HIDDEN + column * GROUP + n[None, :]
        tl.store(at, weighted.to(out.dtype.element_ty), mask=real[:, None])


def block_of(pairs: int, experts: int) -> int:
    """Return how many pairs a program computes, for ``pairs`` pairs over ``experts`` experts."""
    return 16 if pairs <= 16 * experts else 32 if pairs <= 32 * experts else 64


def _launch(block: int, warps: int, stages: int) -> dict[str, int]:
    """Return how a kernel is launched: ``warps`` and ``stages`` for blocks of 64 pairs, or what is best for less.

    Measured on an H200 with the experts of Qwen3-30B-A3B: docs/benchmarks/h200.md.
    """
    return {"BLOCK_M": block, "num_warps": 4 if block < 64 else warps, "num_stages": 3 if block < 64 else stages}


def up(x: QuantizedRows, gate_up: Fp8Weight, pairs: Tensor, owner: Tensor, top_k: int, act: str) -> QuantizedRows:
    """Launch the first product: x [tokens, hidden], gate_up [experts, 2·inner, hidden] → [len(pairs), inner].

    Row i of the result belongs to ``pairs[i]``. Rows of no pair, or of another rank's expert, are uninitialised.
    """
    (tokens, hidden), inner = x.values.shape, gate_up.values.shape[1] // 2
    values = torch.empty((len(pairs), inner), dtype=E4M3, device=pairs.device)
    factors = torch.empty((inner // BLOCK, len(pairs)), device=pairs.device)
    up_kernel[(inner // BLOCK, len(owner))](
        x.values, x.factors, *gate_up, values, factors, pairs, owner, tokens * top_k, x.factors.stride(1),
        factors.stride(0), TOP_K=top_k, HIDDEN=hidden, INNER=inner, ACT=act,
        DTYPE=getattr(tl, str(x.dtype).removeprefix("torch.")), **_launch(len(pairs) // len(owner), 4, 2),
        **starts_early(x.values),
    )  # fmt: skip
    return QuantizedRows(values, factors.T, x.dtype)


def down(inner: QuantizedRows, weight: Fp8Weight, scale: Tensor, pairs: Tensor, owner: Tensor) -> Tensor:
    """Launch the second product: inner [len(pairs), inner], weight [experts, hidden, inner] → [tokens · top_k, hidden].

    Each row is multiplied by its pair's router weight, scale [tokens, top_k] float32. The result is in the order of the
    pairs' numbers.
    """
    hidden = weight.values.shape[1]
    out = torch.empty((scale.numel(), hidden), dtype=inner.dtype, device=pairs.device)
    down_kernel[(hidden // BLOCK, len(owner))](
        inner.values, inner.factors, *weight, scale, out, pairs, owner, scale.numel(), inner.factors.stride(1),
        HIDDEN=hidden, INNER=inner.values.shape[1], **_launch(len(pairs) // len(owner), 8, 3),
        **starts_early(inner.values),
    )  # fmt: skip
    return out
