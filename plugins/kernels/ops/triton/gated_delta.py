"""Linear attention with the gated delta rule in Triton: one token of each decode row, in two launches.

The states of the rows are read and written in place. `minisgl.plugins.models.gated_delta` has the torch reference.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl.plugins.kernels.ops.triton.early import start_next, starts_early, wait_for_previous
from minisgl.utils.launch import one_launch

__all__ = ["Heads", "Weights", "decode", "serves"]


class Heads(NamedTuple):
    """The heads of a layer: key heads of ``dk`` dimensions, and ``ratio`` value heads of ``dv`` for each of them."""

    k_heads: int
    ratio: int
    dk: int
    dv: int

    @property
    def v_heads(self) -> int:
        """Number of value heads."""
        return self.k_heads * self.ratio

    @property
    def features(self) -> int:
        """Number of inputs of the convolution: those of queries, keys and values, one after another."""
        return 2 * self.k_heads * self.dk + self.v_heads * self.dv


class Weights(NamedTuple):
    """The weights of a layer between its projections."""

    conv: Tensor  # [features, 1, kernel]
    dt_bias: Tensor  # [v_heads]
    A_log: Tensor  # [v_heads]
    norm: Tensor  # [dv]
    eps: float


@triton.jit(do_not_specialize_on_alignment=["slots", "seq_lens"])
def convolve_kernel(
    mixed, state, weight, out, slots, seq_lens, stride_mixed, query_scale,
    K_HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, FEATURES: tl.constexpr, KERNEL: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    """Convolve the features of one head of one row with the last inputs in its slot, which move on by one token.

    Writes silu of the result, float32; of queries and keys, with length 1. Queries are multiplied with ``query_scale``.
    """
    row, head = tl.program_id(0), tl.program_id(1)
    if EARLY:
        start_next()
        wait_for_previous()
    is_key = head < 2 * K_HEADS
    first = tl.where(is_key, head * DK, 2 * K_HEADS * DK + (head - 2 * K_HEADS) * DV)
    i, j = tl.arange(0, BLOCK), tl.arange(0, BLOCK_K)
    feature, real = first + i, i < tl.where(is_key, DK, DV)
    token = tl.load(mixed + row.to(tl.int64) * stride_mixed + feature, mask=real, other=0.0)
    kept = tl.load(seq_lens + row) != 1  # a row that begins at position 0 has no earlier inputs
    slot = tl.load(slots + row).to(tl.int64)
    inputs = state + (slot * FEATURES + feature[:, None]) * (KERNEL - 1) + j[None, :]
    known = real[:, None] & kept
    last = tl.load(inputs, mask=known & (j[None, :] < KERNEL - 1), other=0.0)
    moved = tl.load(inputs + 1, mask=known & (j[None, :] < KERNEL - 2), other=0.0)
    taps = weight + feature[:, None] * KERNEL + j[None, :]
    early_taps = tl.load(taps, mask=real[:, None] & (j[None, :] < KERNEL - 1), other=0.0).to(tl.float32)
    last_tap = tl.load(weight + feature * KERNEL + KERNEL - 1, mask=real, other=0.0).to(tl.float32)
    total = tl.sum(last.to(tl.float32) * early_taps, 1) + token.to(tl.float32) * last_tap
    value = total * tl.sigmoid(total)
    if is_key:
        value = value * tl.rsqrt(tl.sum(value * value, 0) + 1e-6)
    if head < K_HEADS:
        value = value * query_scale
    tl.store(out + row.to(tl.int64) * FEATURES + feature, value, mask=real)
    tl.debug_barrier()  # all threads have read the old inputs
    moved = tl.where(j[None, :] == KERNEL - 2, token[:, None].to(moved.dtype), moved)
    tl.store(inputs, moved, mask=real[:, None] & (j[None, :] < KERNEL - 1))


@triton.jit(do_not_specialize_on_alignment=["slots", "seq_lens"])
def absorb_kernel(
    features, state, gate, beta, decay, A_log, dt_bias, norm, out, slots, seq_lens,
    stride_gate, stride_beta, stride_decay, stride_out, eps,
    K_HEADS: tl.constexpr, RATIO: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    """Absorb one token of one row into the state of one value head, and read it: norm and gate included."""
    row, head = tl.program_id(0), tl.program_id(1)
    v_heads: tl.constexpr = K_HEADS * RATIO
    k, v = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    real_k, real_v = k < DK, v < DV
    rate = tl.exp(tl.load(A_log + head).to(tl.float32))
    bias = tl.load(dt_bias + head).to(tl.float32)
    by = tl.load(norm + v, mask=real_v, other=0.0)
    if EARLY:
        start_next()
        wait_for_previous()
    at = row.to(tl.int64)
    kept = tl.load(seq_lens + row) != 1
    matrix = state + (tl.load(slots + row).to(tl.int64) * v_heads + head) * DK * DV + k[:, None] * DV + v[None, :]
    real = real_k[:, None] & real_v[None, :]
    content = tl.load(matrix, mask=real & kept, other=0.0)
    own = features + at * (2 * K_HEADS * DK + v_heads * DV)
    query = tl.load(own + head // RATIO * DK + k, mask=real_k, other=0.0)
    key = tl.load(own + (K_HEADS + head // RATIO) * DK + k, mask=real_k, other=0.0)
    value = tl.load(own + 2 * K_HEADS * DK + head * DV + v, mask=real_v, other=0.0)
    strength = tl.sigmoid(tl.load(beta + at * stride_beta + head).to(tl.float32))
    step = tl.load(decay + at * stride_decay + head).to(tl.float32) + bias
    step = tl.where(step > 20.0, step, tl.log(1.0 + tl.exp(tl.minimum(step, 20.0))))  # softplus
    content = content * tl.exp(-rate * step)
    correction = strength * (value - tl.sum(key[:, None] * content, 0))
    content += key[:, None] * correction[None, :]
    tl.store(matrix, content, mask=real)
    dtype = out.dtype.element_ty
    read = tl.sum(query[:, None] * content, 0).to(dtype).to(tl.float32)
    normed = (read * tl.rsqrt(tl.sum(read * read, 0) / DV + eps)).to(dtype).to(tl.float32)
    normed = (by.to(tl.float32) * normed).to(dtype).to(tl.float32)
    z = tl.load(gate + at * stride_gate + head * DV + v, mask=real_v, other=0.0).to(tl.float32)
    tl.store(out + at * stride_out + head * DV + v, (normed * z * tl.sigmoid(z)).to(dtype), mask=real_v)


def serves(heads: Heads, kernel: int) -> bool:
    """Return whether a head's state fits in the registers of one program, and the convolution has several taps."""
    return triton.next_power_of_2(heads.dk) * triton.next_power_of_2(heads.dv) <= 1 << 15 and 2 <= kernel <= 8


@one_launch
def decode(
    mixed: Tensor, gate: Tensor, beta: Tensor, decay: Tensor, states: list[Tensor], slots: Tensor, seq_lens: Tensor,
    weights: Weights, heads: Heads, out: Tensor,
) -> None:  # fmt: skip
    """Absorb one token of each row, and write what is read, normed and gated, to out [rows, v_heads · dv].

    mixed [rows, features], gate [rows, v_heads · dv], beta and decay [rows, v_heads] are the layer's projections, with
    contiguous rows. ``states`` are the last inputs [slots, features, kernel - 1] and the matrices [slots, v_heads, dk,
    dv] float32, of which each row changes those in its slot. A row of length 1 begins with an empty state. Slots and
    lengths are int32 [rows].
    """
    rows, (inputs, matrices), kernel = len(mixed), states, weights.conv.shape[-1]
    features = torch.empty((rows, heads.features), dtype=torch.float32, device=mixed.device)
    block_k, block_v = triton.next_power_of_2(heads.dk), triton.next_power_of_2(heads.dv)
    early = starts_early(mixed)
    convolve_kernel[(rows, 2 * heads.k_heads + heads.v_heads)](
        mixed, inputs, weights.conv, features, slots, seq_lens, mixed.stride(0), heads.dk**-0.5,
        K_HEADS=heads.k_heads, DK=heads.dk, DV=heads.dv, FEATURES=heads.features, KERNEL=kernel,
        BLOCK=max(block_k, block_v), BLOCK_K=triton.next_power_of_2(kernel), num_warps=4, **early,
    )  # fmt: skip
    absorb_kernel[(rows, heads.v_heads)](
        features, matrices, gate, beta, decay, weights.A_log, weights.dt_bias, weights.norm, out, slots, seq_lens,
        gate.stride(0), beta.stride(0), decay.stride(0), out.stride(0), weights.eps,
        K_HEADS=heads.k_heads, RATIO=heads.ratio, DK=heads.dk, DV=heads.dv, BLOCK_K=block_k, BLOCK_V=block_v,
        num_warps=8 if block_k * block_v > 4096 else 4, **early,
    )  # fmt: skip
