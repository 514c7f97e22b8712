"""Projections and experts of a decoder layer for 1 to 8 decode rows, in Triton, fused with what precedes and follows.

With few rows a layer is limited by the bytes of its weights and by the time between two launches. So there are few
kernels, and a projection loads its weights before it waits for the preceding kernel (programmatic dependent launch). A
warp of a projection reads whole rows of the weight, for all rows of x, and exchanges no data with other warps.
`minisgl.plugins.kernels.ops.triton.projected_attention` has the attention between the projections, and
`minisgl.plugins.kernels.ops.decode_layer` the torch references.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl.plugins.kernels.ops.triton.activation import gate
from minisgl.plugins.kernels.ops.triton.device import device_function
from minisgl.plugins.kernels.ops.triton.early import start_next, starts_early, wait_for_previous

COLS = tl.constexpr(256)
"""Columns of the weight that a warp loads at once: 32 threads with 8 elements of 2 bytes each."""

MAX_STEPS = 16
"""The most tiles of `COLS` columns that a warp keeps in registers: 16 · 8 elements per thread and row of the weight."""


MIN_PROGRAMS = 128
"""A program of a projection has fewer warps, down to one, if there would be fewer programs than this.

So nearly all of the 132 multiprocessors of an H100 or H200 have one. Gate and up have half as many programs.
"""


@device_function
def load_tiles(at, k, IN: tl.constexpr, STEPS: tl.constexpr):
    """Load the columns 0 to IN as a tuple of STEPS tiles [N, COLS]; ``at`` [N, COLS] points to columns k.

    Columns from IN on are 0.
    """
    tiles = ()
    for step in tl.static_range(STEPS):
        if STEPS * COLS == IN:
            tile = tl.load(at + step * COLS)
        else:
            tile = tl.load(at + step * COLS, mask=step * COLS + k < IN, other=0.0)
        tiles = tiles + (tile,)  # type: ignore[assignment]  # noqa: RUF005
    return tiles


@device_function
def dot_rows(a, w, STEPS: tl.constexpr):
    """Return the sums over the columns of a·w, [N] float32, for tuples of STEPS tiles [N, COLS]."""
    total = a[0].to(tl.float32) * w[0].to(tl.float32)
    for step in tl.static_range(1, STEPS):
        total += a[step].to(tl.float32) * w[step].to(tl.float32)
    return tl.sum(total, 1)


@device_function
def scaled(a, scales, STEPS: tl.constexpr):
    """Return a·scales in float32, for tuples of STEPS tiles."""
    tiles = ()
    for step in tl.static_range(STEPS):
        tiles = tiles + (a[step].to(tl.float32) * scales[step].to(tl.float32),)  # type: ignore[assignment]  # noqa: RUF005
    return tiles


@device_function
def columns(BLOCK_N: tl.constexpr):
    """Return the offsets [BLOCK_N, COLS] of COLS columns, the same for every row.

    A vector is loaded with offsets as large as a tile of the weight, so that each warp loads it for its own rows and no
    data passes between warps.
    """
    return tl.broadcast_to(tl.arange(0, COLS)[None, :], [BLOCK_N, COLS])


@triton.jit(do_not_specialize=["rows"])
def projection_kernel(
    x, norm_weight, weight, bias, residual, y, rows, stride_x, eps,
    OUT: tl.constexpr, IN: tl.constexpr, NORM: tl.constexpr, HAS_BIAS: tl.constexpr, ADD: tl.constexpr,
    ACT: tl.constexpr, TWO: tl.constexpr, GATED: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr, STEPS: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    """Compute BLOCK_N outputs, or 2 · BLOCK_N with TWO, for up to ROWS rows of x. One warp: one output, or two.

    The outputs are y = norm(x)·weightᵀ + bias + residual, as far as NORM, HAS_BIAS and ADD ask for. With GATED the
    weight is [2·OUT, IN], gate rows first, and y = act(gate)·up; then TWO must be set. The norm's scale is a factor of
    the whole row, so it is applied to the sums instead of x.
    """
    n = tl.program_id(0) * (2 * BLOCK_N if TWO and not GATED else BLOCK_N) + tl.arange(0, BLOCK_N)
    second = OUT if GATED else BLOCK_N  # distance of a warp's second row of the weight
    k = columns(BLOCK_N)
    at = weight + n[:, None] * IN + k
    w = load_tiles(at, k, IN, STEPS)
    w2 = load_tiles(at + second * IN, k, IN, STEPS) if TWO else w
    scales = load_tiles(norm_weight + k, k, IN, STEPS) if NORM else w
    if EARLY:
        start_next()
        wait_for_previous()
    for r in tl.static_range(ROWS):
        real = (n < OUT) & (r < rows)
        row = tl.minimum(r, rows - 1)  # rows past the last one are computed like the last one, and not stored
        if ADD:
            added = tl.load(residual + row * OUT + n).to(tl.float32)
        if ADD and TWO:
            added2 = tl.load(residual + row * OUT + BLOCK_N + n).to(tl.float32)
        a = load_tiles(x + row * stride_x + k, k, IN, STEPS)
        scale = 1.0
        if NORM:
            scale = tl.rsqrt(dot_rows(a, a, STEPS) / IN + eps)
            a = scaled(a, scales, STEPS)
        total = dot_rows(a, w, STEPS) * scale
        if HAS_BIAS:
            total += tl.load(bias + n).to(tl.float32)
        if TWO:
            total2 = dot_rows(a, w2, STEPS) * scale
            if HAS_BIAS:
                total2 += tl.load(bias + second + n).to(tl.float32)
        if GATED:
            total = gate(total, ACT) * total2
        if ADD:
            total += added
        tl.store(y + row * OUT + n, total.to(y.dtype.element_ty), mask=real)
        if TWO and not GATED:
            if ADD:
                total2 += added2
            tl.store(y + row * OUT + BLOCK_N + n, total2.to(y.dtype.element_ty), mask=real)


def serves(dtype: torch.dtype, weight: Tensor) -> bool:
    """Return whether `projection` supports a weight [out, in] for x of ``dtype``: see its arguments."""
    out, inner = weight.shape
    return (
        weight.is_contiguous()
        and weight.dtype == dtype
        and out % 64 == inner % 8 == 0
        and inner <= MAX_STEPS * COLS.value
    )


def projection(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    act: str | None = None,
) -> Tensor:
    """Compute `minisgl.plugins.kernels.ops.decode_layer.projection_torch` for at most 8 rows. See `serves`."""
    (rows, inner), out = x.shape, weight.shape[0]
    two = act is not None or out > 2048
    # Small programs where each warp has many registers, so that the next kernel's programs fit beside them.
    warps = 8 if rows <= 2 and not (two and inner > 1024) else 4
    while warps > 1 and out < warps * MIN_PROGRAMS:
        warps //= 2
    out //= 1 if act is None else 2
    y = torch.empty((rows, out), dtype=x.dtype, device=x.device)
    projection_kernel[(out // (2 * warps if two and act is None else warps),)](
        x, norm_weight, weight, bias, residual, y, rows, x.stride(0), eps,
        OUT=out, IN=inner, NORM=norm_weight is not None, HAS_BIAS=bias is not None, ADD=residual is not None,
        ACT=act, TWO=two, GATED=act is not None, ROWS=triton.next_power_of_2(rows),
        BLOCK_N=warps, STEPS=steps_of(inner), num_warps=warps, **starts_early(x),
    )  # fmt: skip
    return y


# ---- experts -----------------------------------------------------------------------------------------------


@triton.jit
def experts_up_kernel(
    x, norm_weight, logits, gate_up, inner_out, ids, weights, stride_x, stride_expert, eps,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, RENORMALIZE: tl.constexpr, INNER: tl.constexpr, HIDDEN: tl.constexpr,
    ACT: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_J: tl.constexpr, TILES: tl.constexpr,
    BLOCK_N: tl.constexpr, STEPS: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    """Route one token, and compute act(norm(x)·gateᵀ)·(norm(x)·upᵀ) for BLOCK_N inner elements of one chosen expert.

    One program: one token, one choice, BLOCK_N warps with one gate row and one up row each. The first program of each
    choice writes the expert's number and weight for `experts_down_kernel`.
    """
    tile, choice, token = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    n = tile * TILES * BLOCK_N + tl.arange(0, BLOCK_N)
    k = columns(BLOCK_N)
    if EARLY:
        start_next()
        wait_for_previous()
    # An expert's place is the number of better experts; among equal logits the smaller number is better. The better
    # experts are along the first dimension: then a thread has a part of each sum, and few values pass between threads.
    number = tl.arange(0, BLOCK_E)
    mine = tl.load(logits + token * EXPERTS + number, mask=number < EXPERTS, other=float("-inf")).to(tl.float32)
    place = tl.zeros([BLOCK_E], tl.int32)
    for start in tl.static_range(0, BLOCK_E, BLOCK_J):
        j = start + tl.arange(0, BLOCK_J)
        theirs = tl.load(logits + token * EXPERTS + j, mask=j < EXPERTS, other=float("-inf")).to(tl.float32)[:, None]
        better = (theirs > mine[None, :]) | ((theirs == mine[None, :]) & (j[:, None] < number[None, :]))
        place += tl.sum(better.to(tl.int32), 0)
    expert = tl.minimum(tl.sum(tl.where(place == choice, number, 0), 0), EXPERTS - 1)  # NaN: any expert
    at = gate_up + expert.to(tl.int64) * stride_expert + n[:, None] * HIDDEN + k
    w = load_tiles(at, k, HIDDEN, STEPS)
    w2 = load_tiles(at + INNER * HIDDEN, k, HIDDEN, STEPS)
    a = load_tiles(x + token * stride_x + k, k, HIDDEN, STEPS)
    if tile == 0:
        odds = tl.exp(mine - tl.max(mine, 0))
        total = tl.sum(tl.where(place < TOP_K, odds, 0.0) if RENORMALIZE else odds, 0)
        tl.store(ids + token * TOP_K + choice, expert)
        tl.store(weights + token * TOP_K + choice, tl.sum(tl.where(place == choice, odds, 0.0), 0) / total)
    scale = tl.rsqrt(dot_rows(a, a, STEPS) / HIDDEN + eps)
    a = scaled(a, load_tiles(norm_weight + k, k, HIDDEN, STEPS), STEPS)
    for t in tl.static_range(TILES):
        if t > 0:
            w = load_tiles(at + t * BLOCK_N * HIDDEN, k, HIDDEN, STEPS)
            w2 = load_tiles(at + (INNER + t * BLOCK_N) * HIDDEN, k, HIDDEN, STEPS)
        merged = gate(dot_rows(a, w, STEPS) * scale, ACT) * (dot_rows(a, w2, STEPS) * scale)
        inner_at = inner_out + (token * TOP_K + choice) * INNER + n + t * BLOCK_N
        tl.store(inner_at, merged.to(inner_out.dtype.element_ty))


@triton.jit
def experts_down_kernel(
    inner, down, ids, weights, residual, y, stride_expert,
    TOP_K: tl.constexpr, INNER: tl.constexpr, HIDDEN: tl.constexpr, BLOCK_N: tl.constexpr, STEPS: tl.constexpr,
    EARLY: tl.constexpr = False,
):  # fmt: skip
    """Compute y = residual + the weighted sum of the chosen experts' down projections. One warp: one output."""
    n, token = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.program_id(1)
    k = columns(BLOCK_N)
    if EARLY:
        start_next()
        wait_for_previous()
    total = tl.load(residual + token * HIDDEN + n).to(tl.float32)
    for choice in tl.static_range(TOP_K):
        expert = tl.load(ids + token * TOP_K + choice).to(tl.int64)
        weight = tl.load(weights + token * TOP_K + choice)
        w = load_tiles(down + expert * stride_expert + n[:, None] * INNER + k, k, INNER, STEPS)
        a = load_tiles(inner + (token * TOP_K + choice) * INNER + k, k, INNER, STEPS)
        total += weight * dot_rows(a, w, STEPS)
    tl.store(y + token * HIDDEN + n, total.to(y.dtype.element_ty))


def serves_experts(x: Tensor, gate_up: Tensor, down: Tensor) -> bool:
    """Return whether `experts` supports these weights: each expert's contiguous, with sizes that are multiples of 8."""
    hidden, inner = down.shape[1:]
    return (
        gate_up[0].is_contiguous()
        and down[0].is_contiguous()
        and x.dtype == gate_up.dtype
        and hidden % 8 == inner % 8 == 0
        and max(hidden, inner) <= MAX_STEPS * COLS.value
    )


def experts(
    x: Tensor, norm_weight: Tensor, eps: float, logits: Tensor, gate_up: Tensor, down: Tensor, top_k: int,
    renormalize: bool, act: str,
) -> Tensor:  # fmt: skip
    """Compute `minisgl.plugins.kernels.ops.decode_layer.experts_torch` in two launches. See `serves_experts`."""
    (rows, hidden), (count, _, inner) = x.shape, down.shape
    ids = torch.empty((rows, top_k), dtype=torch.int32, device=x.device)
    weights = torch.empty((rows, top_k), dtype=torch.float32, device=x.device)
    inners = torch.empty((rows, top_k, inner), dtype=x.dtype, device=x.device)
    y = torch.empty_like(x)
    warps, down_warps, early = 4, 8, starts_early(x)
    tiles = next(tiles for tiles in (4, 2, 1) if inner % (warps * tiles) == 0)
    block_e = triton.next_power_of_2(count)
    experts_up_kernel[(inner // (warps * tiles), top_k, rows)](
        x, norm_weight, logits, gate_up, inners, ids, weights, x.stride(0), gate_up.stride(0), eps,
        EXPERTS=count, TOP_K=top_k, RENORMALIZE=renormalize, INNER=inner, HIDDEN=hidden, ACT=act,
        BLOCK_E=block_e, BLOCK_J=min(64, block_e), TILES=tiles, BLOCK_N=warps, STEPS=steps_of(hidden),
        num_warps=warps, **early, **registers(x, hidden, 168, 2048),
    )  # fmt: skip
    experts_down_kernel[(hidden // down_warps, rows)](
        inners, down, ids, weights, x, y, down.stride(0),
        TOP_K=top_k, INNER=inner, HIDDEN=hidden, BLOCK_N=down_warps, STEPS=steps_of(inner), num_warps=down_warps,
        **early, **registers(x, inner, 128, 768),
    )  # fmt: skip
    return y


def steps_of(columns: int) -> int:
    """Return the number of tiles of `COLS` columns that cover ``columns`` columns."""
    return int(triton.cdiv(columns, COLS.value))


def registers(x: Tensor, inner: int, limit: int, most: int) -> dict[str, int]:
    """Return the option that limits a thread of a kernel to ``limit`` registers, or none for larger weights.

    The limit also tells the assembler how many registers to use. Without it, `experts_up_kernel` has 172, and one
    program less fits in a multiprocessor. `experts_down_kernel` has 54, and loads the weights of one expert after those
    of another. Measured for the experts of Qwen3-30B-A3B in bfloat16: 2,048 and 768 columns ``inner``. More than
    ``most`` columns of 2 bytes would not fit in the registers.
    """
    return {"maxnreg": limit} if x.is_cuda and inner * x.itemsize <= 2 * most else {}
