"""The experts' grouped matrix products for Hopper, in Triton: tiles of weights are loaded by TMA.

The products are those of `minisgl.plugins.kernels.ops.triton.moe`, which runs on any GPU. There are four differences. A
tensor descriptor loads a whole tile of weights with one instruction of the tensor memory accelerator (TMA). Gate and up
are one tile of twice as many columns, so that the first product is one matrix product instead of two. The result of the
first product is stored in the order of the sorted pairs, so the second product loads contiguous rows, also by TMA. With
many tokens, the programs of the second product are persistent: each computes several tiles, and loads the next tile
while it stores the previous one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from minisgl.plugins.kernels.ops.triton.activation import gated
from minisgl.plugins.kernels.ops.triton.device import device_function, is_hopper, multiprocessors
from minisgl.plugins.kernels.ops.triton.early import start_next, starts_early, wait_for_previous
from minisgl.plugins.kernels.ops.triton.moe import Extras, Tiles

MIN_PERSISTENT_M = 128
"""Tiles of at least this many pairs have persistent programs in the second product: faster on an H200."""


@triton.jit(do_not_specialize=["n_pairs"])
def up_kernel(
    x, gate_up, inner_out, pairs, owner, bias, n_pairs, stride_x,
    TOP_K: tl.constexpr, HIDDEN: tl.constexpr, INNER: tl.constexpr, ACT: tl.constexpr,
    ALPHA: tl.constexpr, LIMIT: tl.constexpr, BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    """Compute inner_out[i] = act(x[token] · gateᵀ) · (x[token] · upᵀ) for the sorted pair i, which belongs to token.

    gate_up is a tensor descriptor of [2 · experts, INNER, HIDDEN]: elements outside the bounds are read as 0. One
    program: one block of pairs, BLOCK_N columns.
    """
    block, column = tl.program_id(1), tl.program_id(0) * BLOCK_N
    if EARLY:
        start_next()
        wait_for_previous()
    expert = tl.load(owner + block)
    if expert >= 0:
        i = block * BLOCK_M + tl.arange(0, BLOCK_M)
        pair = tl.load(pairs + i)
        real = pair < n_pairs
        n, k = column + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
        x_at = x + (pair // TOP_K).to(tl.int64)[:, None] * stride_x + k[None, :]
        total = tl.zeros([BLOCK_M, 2 * BLOCK_N], tl.float32)
        for start in range(0, HIDDEN, BLOCK_K):
            if HIDDEN % BLOCK_K == 0:
                rows = tl.load(x_at + start, mask=real[:, None], other=0.0)
            else:
                rows = tl.load(x_at + start, mask=real[:, None] & (start + k < HIDDEN)[None, :], other=0.0)
            weights = gate_up.load([expert * 2, column, start]).reshape(2 * BLOCK_N, BLOCK_K)
            total = tl.dot(rows, weights.T, total, input_precision="ieee")
        gates, ups = total.reshape(BLOCK_M, 2, BLOCK_N).permute(0, 2, 1).split()
        if BIAS:
            at = bias + expert * 2 * INNER + n
            gates += tl.load(at, mask=n < INNER, other=0.0)[None, :]
            ups += tl.load(at + INNER, mask=n < INNER, other=0.0)[None, :]
        merged = gated(gates, ups, ACT, ALPHA, LIMIT).to(inner_out.dtype.element_ty)
        out_at = inner_out + i.to(tl.int64)[:, None] * INNER + n[None, :]
        tl.store(out_at, merged, mask=real[:, None] & (n[None, :] < INNER))


@triton.jit(do_not_specialize=["n_pairs", "blocks"])
def down_kernel(
    inner, down, scale, out, pairs, owner, bias, n_pairs, blocks,
    HIDDEN: tl.constexpr, INNER: tl.constexpr, PERSISTENT: tl.constexpr, BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    """Compute out[pair] = scale[pair] · (inner[i] · downᵀ) for the sorted pair i.

    inner is a tensor descriptor of [pairs, INNER], down of [experts, HIDDEN, INNER]. Rows of inner that belong to no
    pair may hold anything: they change no other row. A tile is one block of pairs and BLOCK_N columns. One program: one
    tile. With PERSISTENT, program p of P programs computes the tiles p, p + P, p + 2·P, ….
    """
    columns: tl.constexpr = (HIDDEN + BLOCK_N - 1) // BLOCK_N
    program, programs = tl.program_id(0), tl.num_programs(0)
    if EARLY:
        start_next()
        wait_for_previous()
    if PERSISTENT:
        tiles = used_blocks(owner, blocks) * columns
    else:  # one iteration, or none if the block has no expert
        tiles = tl.where(tl.load(owner + program // columns) >= 0, programs, 0)
    for tile in tl.range(program, tiles, programs, flatten=PERSISTENT):
        block, column = tile // columns, tile % columns * BLOCK_N
        expert = tl.load(owner + block)
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in range(0, INNER, BLOCK_K):
            rows = inner.load([block * BLOCK_M, start])
            weights = down.load([expert, column, start]).reshape(BLOCK_N, BLOCK_K)
            total = tl.dot(rows, weights.T, total, input_precision="ieee")
        pair = tl.load(pairs + block * BLOCK_M + tl.arange(0, BLOCK_M))
        real = pair < n_pairs
        n = column + tl.arange(0, BLOCK_N)
        if BIAS:
            total += tl.load(bias + expert * HIDDEN + n, mask=n < HIDDEN, other=0.0)[None, :]
        weighted = total * tl.load(scale + pair, mask=real, other=0.0)[:, None]
        out_at = out + pair.to(tl.int64)[:, None] * HIDDEN + n[None, :]
        tl.store(out_at, weighted.to(out.dtype.element_ty), mask=real[:, None] & (n[None, :] < HIDDEN))


@device_function
def used_blocks(owner, blocks):
    """Return how many of the ``blocks`` blocks of pairs have an expert: the first ones."""
    total = 0
    for start in range(0, blocks, 1024):
        i = start + tl.arange(0, 1024)
        total += tl.sum((tl.load(owner + i, mask=i < blocks, other=-1) >= 0).to(tl.int32), 0)
    return total


def serves(x: Tensor, gate_up: Tensor, down: Tensor) -> bool:
    """Return whether the kernels of this module support these tensors: half precision on Hopper, aligned for TMA."""
    return (
        x.is_cuda
        and x.itemsize == 2
        and x.dtype == gate_up.dtype == down.dtype
        and gate_up.is_contiguous()
        and down.is_contiguous()
        # TMA needs row strides and addresses that are multiples of 16 bytes.
        and gate_up.shape[2] % 8 == down.shape[2] % 8 == 0
        and gate_up.data_ptr() % 16 == down.data_ptr() % 16 == 0
        and is_hopper(x.device)  # the first GPU with TMA
    )


def up(
    x: Tensor, gate_up: Tensor, pairs: Tensor, owner: Tensor, top_k: int, act: str, tiles: Tiles,
    extras: Extras,
) -> Tensor:  # fmt: skip
    """Launch the first product: x [tokens, hidden], gate_up [experts, 2·inner, hidden] → [len(pairs), inner].

    Row i of the result belongs to ``pairs[i]``. Rows of no pair, or of another rank's expert, are uninitialised.
    """
    hidden, inner = x.shape[1], gate_up.shape[1] // 2
    out = torch.empty((len(pairs), inner), dtype=x.dtype, device=x.device)
    up_kernel[(triton.cdiv(inner, tiles.n), len(owner))](
        x, TensorDescriptor.from_tensor(gate_up.view(-1, inner, hidden), [2, tiles.n, tiles.k]), out, pairs, owner,
        extras.up_bias, x.shape[0] * top_k, x.stride(0), TOP_K=top_k, HIDDEN=hidden, INNER=inner, ACT=act,
        ALPHA=extras.alpha, LIMIT=extras.limit, BIAS=extras.up_bias is not None,
        BLOCK_M=tiles.m, BLOCK_N=tiles.n, BLOCK_K=tiles.k, num_warps=tiles.warps, num_stages=tiles.stages,
        **starts_early(x),
    )  # fmt: skip
    return out


def down(
    inner: Tensor, weight: Tensor, scale: Tensor, pairs: Tensor, owner: Tensor, tiles: Tiles, extras: Extras
) -> Tensor:
    """Launch the second product: inner [len(pairs), inner], weight [experts, hidden, inner] → [tokens · top_k, hidden].

    Each row is multiplied by its pair's router weight, scale [tokens, top_k] float32. The result is in the order of the
    pairs' numbers, as that of `minisgl.plugins.kernels.ops.triton.moe.down`.
    """
    n, hidden, blocks = scale.numel(), weight.shape[1], len(owner)
    out = torch.empty((n, hidden), dtype=inner.dtype, device=inner.device)
    programs, persistent = triton.cdiv(hidden, tiles.n) * blocks, tiles.m >= MIN_PERSISTENT_M
    if persistent:
        programs = min(programs, multiprocessors(inner.device))
    down_kernel[(programs,)](
        TensorDescriptor.from_tensor(inner, [tiles.m, tiles.k]),
        TensorDescriptor.from_tensor(weight, [1, tiles.n, tiles.k]),
        scale, out, pairs, owner, extras.down_bias, n, blocks, HIDDEN=hidden, INNER=inner.shape[1],
        PERSISTENT=persistent, BIAS=extras.down_bias is not None,
        BLOCK_M=tiles.m, BLOCK_N=tiles.n, BLOCK_K=tiles.k, num_warps=tiles.warps, num_stages=tiles.stages,
        **starts_early(inner),
    )  # fmt: skip
    return out
