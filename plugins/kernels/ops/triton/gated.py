"""A gated projection in Triton for GPUs with a tensor memory accelerator (TMA).

TMA loads tiles of x, gate and up; one tensor-core product computes gate and up side by side. The kernel is persistent:
there are at most as many programs as multiprocessors, and each program loops over tiles, so that the end of one tile
overlaps the beginning of the next. Tiles are visited in groups of ``group`` tile rows, so that the group's rows of x
stay in the L2 cache while the weights stream through it (the grouped order of Triton's matrix multiplication tutorial).
The torch reference is in `minisgl.plugins.kernels.ops.gated`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from minisgl.plugins.kernels.ops.triton.activation import gate
from minisgl.plugins.kernels.ops.triton.device import is_hopper, multiprocessors

ROWS = 2048
"""The smallest number of rows for which this kernel was faster than cuBLAS plus the activation, on an H200."""


class Tile(NamedTuple):
    """A tile: ``m`` rows by ``n`` columns of gate and ``n`` of up, ``k`` inputs per iteration.

    Tiles are visited in groups of ``group`` tile rows. ``warps`` and ``stages`` are Triton's num_warps and num_stages.
    """

    m: int
    n: int
    k: int
    group: int
    warps: int
    stages: int


TILE = Tile(128, 128, 64, 8, 8, 3)
"""The fastest tile measured on an H200; `python -m minisgl.bench tiles gated` measures more tiles."""


@triton.jit(do_not_specialize=["rows"])
def gated_linear_kernel(
    x, weight, out, rows, DIM: tl.constexpr, IN: tl.constexpr, ACT: tl.constexpr, PROGRAMS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Compute out = act(x·gateᵀ)·(x·upᵀ) tile by tile.

    x [rows, IN], weight [2, DIM, IN] and out [rows, DIM] are tensor descriptors: elements outside the bounds are read
    as 0 and not written.
    """
    down, across = tl.cdiv(rows, BLOCK_M), tl.cdiv(DIM, BLOCK_N)
    for tile in tl.range(tl.program_id(0), down * across, PROGRAMS, flatten=True):
        first = tile // (GROUP * across) * GROUP
        size = tl.minimum(down - first, GROUP)
        m = (first + tile % (GROUP * across) % size) * BLOCK_M
        n = tile % (GROUP * across) // size * BLOCK_N
        total = tl.zeros([BLOCK_M, 2 * BLOCK_N], tl.float32)
        for k in range(0, IN, BLOCK_K):
            a = x.load([m, k])
            b = weight.load([0, n, k]).reshape(2 * BLOCK_N, BLOCK_K)
            total = tl.dot(a, b.T, total, input_precision="ieee")
        gates, ups = total.reshape(BLOCK_M, 2, BLOCK_N).permute(0, 2, 1).split()
        out.store([m, n], (gate(gates, ACT) * ups).to(out.dtype))


def serves(x: Tensor, weight: Tensor) -> bool:
    """Return whether `gated_linear` supports these tensors and is faster: many rows in half precision on Hopper."""
    return (
        x.dim() == 2
        and x.shape[0] >= ROWS
        and x.itemsize == 2
        and x.dtype == weight.dtype
        and x.is_contiguous()
        and weight.is_contiguous()
        # TMA needs row strides and addresses that are multiples of 16 bytes.
        and weight.shape[0] % 16 == weight.shape[1] % 8 == 0
        and x.data_ptr() % 16 == weight.data_ptr() % 16 == 0
        and is_hopper(x.device)  # the first GPU with TMA
    )


def gated_linear(x: Tensor, weight: Tensor, act: str, tile: Tile = TILE) -> Tensor:
    """Return act(x·gateᵀ)·(x·upᵀ): x [rows, in], weight [2·dim, in] → [rows, dim]; ``act``: silu, gelu or gelu_tanh."""
    (rows, inner), dim = x.shape, weight.shape[0] // 2
    out = torch.empty((rows, dim), dtype=x.dtype, device=x.device)
    # PROGRAMS is the same constant when there are fewer tiles: each other value would be compiled separately.
    programs = multiprocessors(x.device) if x.is_cuda else 4
    tiles = triton.cdiv(rows, tile.m) * triton.cdiv(dim, tile.n)
    gated_linear_kernel[(min(tiles, programs),)](
        TensorDescriptor.from_tensor(x, [tile.m, tile.k]),
        TensorDescriptor.from_tensor(weight.view(2, dim, inner), [2, tile.n, tile.k]),
        TensorDescriptor.from_tensor(out, [tile.m, tile.n]),
        rows, DIM=dim, IN=inner, ACT=act, PROGRAMS=programs,
        BLOCK_M=tile.m, BLOCK_N=tile.n, BLOCK_K=tile.k, GROUP=tile.group,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out
