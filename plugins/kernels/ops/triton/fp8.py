"""Products with FP8 weights in Triton: weight-only for few rows, and e4m3 times e4m3 for many rows.

A few rows are limited by the bytes of the weight. So activations stay in their dtype (weight-only), which saves the
launch that would quantise them. Many rows are limited by arithmetic, which in e4m3 is twice as fast as in 16 bits; the
sum over each 128 columns is scaled and added up in float32. `minisgl.plugins.kernels.ops.fp8` has the layout and the
torch reference.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl.plugins.kernels.ops.fp8 import Fp8Weight, QuantizedRows
from minisgl.plugins.kernels.ops.triton.activation import gate
from minisgl.plugins.kernels.ops.triton.device import device_function
from minisgl.plugins.kernels.ops.triton.early import start_next, starts_early, wait_for_previous
from minisgl.plugins.kernels.ops.triton.quantize import GROUP, quantize_rows

WARP_COLS = 128
"""Words of four numbers that a warp of `one_row_kernel` loads at once: 32 threads with 16 bytes each."""
MANY_OUTPUTS = 16384
"""From this number of outputs on, one warp with 8 rows of the weight was faster than two warps with 4, on an H200."""

ONE_WAVE = 5280
"""The most outputs whose programs run at the same time, with two warps for 4 rows of the weight.

That is 10 programs on each of 132 multiprocessors. With up to half as many more outputs, the last programs would be too
few to read at full bandwidth, and 2 rows were faster on an H100 (7,168 × 5,120 and 6,144 × 4,096).
"""

UNPACK = tl.constexpr("""{
    .reg .b16 l, h, a, b, c, d;
    .reg .b32 p, q;
    mov.b32 {l, h}, $4;
    cvt.rn.f16x2.e4m3x2 p, l;
    cvt.rn.f16x2.e4m3x2 q, h;
    mov.b32 {a, b}, p;
    mov.b32 {c, d}, q;
    cvt.f32.f16 $0, a;
    cvt.f32.f16 $1, b;
    cvt.f32.f16 $2, c;
    cvt.f32.f16 $3, d;
}""")
"""PTX that converts a word of four e4m3 numbers to float32. Triton's own conversion is for tiles of e4m3."""


@device_function
def half(words):
    """Return the second byte of each word, an e4m3 number, as float32."""
    bits = (words & 0x8000) | ((words & 0x7F00) >> 1)
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0


@device_function
def bfloat(high):
    """Return the bfloat16 numbers in the upper halves of words, whose lower halves are 0, as float32."""
    return high.to(tl.float32, bitcast=True)


@device_function
def dot_words(words, x0, x1, x2, x3, PTX: tl.constexpr):
    """Return the sum of the products of x0 to x3 with the four e4m3 numbers of each word."""
    if PTX:
        w0, w1, w2, w3 = tl.inline_asm_elementwise(
            UNPACK, "=f,=f,=f,=f,r", [words], (tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1
        )
    else:  # Triton's interpreter. Shifted by one, the bits of e4m3 are those of float16, but for a factor of 2⁸.
        w0, w1 = half(words << 8), half(words)
        w2, w3 = half(words >> 8), half(words >> 16)
    return w0 * x0 + w1 * x1 + w2 * x2 + w3 * x3


@device_function
def load_words(at, second, real, WORDS: tl.constexpr, ROWS: tl.constexpr, GATED: tl.constexpr):
    """Load a tile of words [1, COLS] from each of ROWS rows, as a tuple; ``at`` [1, COLS] points to the first row.

    With GATED the second half of the rows begins ``second`` words after the first half.
    """
    tiles = ()
    for r in tl.static_range(ROWS):
        distance = r * WORDS
        if GATED and r >= ROWS // 2:
            distance = (r - ROWS // 2) * WORDS + second
        tiles = tiles + (tl.load(at + distance, mask=real, other=0),)  # type: ignore[assignment]  # noqa: RUF005
    return tiles


@triton.jit
def one_row_kernel(
    x, weight, scale_inv, y, OUT, WORDS: tl.constexpr, COLS: tl.constexpr, ROWS: tl.constexpr, ACT: tl.constexpr,
    GATED: tl.constexpr, PTX: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    """Compute a product with one row of x. A program: ROWS rows of the weight, COLS of WORDS words at a time.

    With GATED the weight is [2·OUT, 4·WORDS], gate rows first, and y is act(gate)·up. A program then has ROWS / 2 rows
    of gate, and the same rows of up.

    The weight is read as words of four e4m3 numbers: Triton would unpack a tile of e4m3 that is loaded one iteration
    ahead to one register for each number. x is read as words of four bfloat16 numbers, with offsets as large as a tile
    of the weight. So each thread loads the elements for its own weights, and no data passes between threads before the
    sums at the end. x is not loaded ahead: Triton would keep it in another layout, and exchange the weights.
    """
    outputs: tl.constexpr = ROWS // 2 if GATED else ROWS
    k = tl.arange(0, COLS)[None, :]
    n = tl.program_id(0) * outputs
    second = OUT.to(tl.int64) * WORDS
    weight += n.to(tl.int64) * WORDS + k
    scale_inv += n // GROUP * tl.cdiv(WORDS * 4, GROUP) + k * 4 // GROUP
    tiles = load_words(weight, second, k < WORDS, WORDS, ROWS, GATED)
    if EARLY:
        start_next()
        wait_for_previous()
    totals = ()
    for _ in tl.static_range(ROWS):
        totals = totals + (tl.zeros([1, COLS], tl.float32),)  # type: ignore[assignment]  # noqa: RUF005
    for start in range(0, WORDS, COLS):
        here = start + k < WORDS
        ahead = load_words(weight + start + COLS, second, start + COLS + k < WORDS, WORDS, ROWS, GATED)
        scale = tl.load(scale_inv + start * 4 // GROUP, mask=here, other=0.0)
        scale2 = scale
        if GATED:
            up = OUT // GROUP * tl.cdiv(WORDS * 4, GROUP)
            scale2 = tl.load(scale_inv + up + start * 4 // GROUP, mask=here, other=0.0)
        a = tl.load(x + start + k, mask=here, other=0)
        lower, upper = a.to(tl.int32), (a >> 32).to(tl.int32)
        x0, x1, x2, x3 = bfloat(lower << 16), bfloat(lower & -65536), bfloat(upper << 16), bfloat(upper & -65536)
        sums = ()
        for r in tl.static_range(ROWS):
            factor = scale2 if r >= outputs else scale
            sums = sums + (totals[r] + factor * dot_words(tiles[r], x0, x1, x2, x3, PTX),)  # type: ignore[assignment]  # noqa: RUF005
        totals, tiles = sums, ahead
    y += n + tl.arange(0, 1)
    for r in tl.static_range(outputs):
        value = tl.sum(totals[r], 1)
        if GATED:
            value = gate(value, ACT) * tl.sum(totals[r + outputs], 1)
        tl.store(y + r, value.to(y.dtype.element_ty))


def serves_one_row(x: Tensor, weight: Fp8Weight) -> bool:
    """Return whether `one_row` supports these: one row in bfloat16, whole tiles, and aligned rows of the weight."""
    out, inner = weight.values.shape
    aligned = x.data_ptr() % 16 == weight.values.data_ptr() % 16 == 0 == inner % 16 == out % 8
    return len(x) == 1 and x.dtype == torch.bfloat16 and x.stride(1) == 1 and aligned


def one_row(x: Tensor, weight: Fp8Weight, act: str | None = None) -> Tensor:
    """Return x·weightᵀ for one row: x [1, in] → [1, out]. Weight-only. See `serves_one_row`.

    With ``act``, the weight has gate and up one after the other, each a multiple of 128 rows, and the result is
    act(gate)·up [1, out / 2].
    """
    out, inner = weight.values.shape
    rows, warps = (8, 1) if out >= MANY_OUTPUTS else (2, 2) if ONE_WAVE < out <= 1.5 * ONE_WAVE else (4, 2)
    gated = act is not None
    y = torch.empty((1, out // 2 if gated else out), dtype=x.dtype, device=x.device)
    one_row_kernel[(out // rows,)](
        x.flatten().view(torch.int64), weight.values.view(torch.int32), weight.scale_inv, y, y.shape[1],
        WORDS=inner // 4, COLS=warps * WARP_COLS, ROWS=rows, ACT=act, GATED=gated,
        PTX=not triton.knobs.runtime.interpret, num_warps=warps, **starts_early(x),
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
    """Return x·weightᵀ [rows, out] for x [rows, in] with at most 64 rows. Weight-only."""
    rows, (out, inner) = x.shape[0], weight.values.shape
    tile = 32
    y = torch.empty((rows, out), dtype=x.dtype, device=x.device)
    few_rows_kernel[(triton.cdiv(out, tile),)](
        x, weight.values, weight.scale_inv, y, rows, out, inner, x.stride(0),
        BLOCK_M=max(16, triton.next_power_of_2(rows)), BLOCK_N=tile, num_warps=4,
        num_stages=2 if x.itemsize == 4 else 4, **starts_early(x),
    )  # fmt: skip
    return y


@triton.jit(do_not_specialize=["rows"])
def many_rows_kernel(
    x, factors, weight, scale_inv, y, rows, OUT, IN, stride_factors,
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
    factors += m
    scale_inv += (tile_n * BLOCK_N // GROUP) * tl.cdiv(IN, GROUP)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, IN, GROUP):
        real = start + k < IN
        a = tl.load(x_at + start, mask=(m[:, None] < rows) & real[None, :], other=0.0)
        b = tl.load(weight_at + start, mask=real[:, None] & (n[None, :] < OUT), other=0.0)
        scale = tl.load(factors + start // GROUP * stride_factors, mask=m < rows, other=0.0)
        scale *= tl.load(scale_inv + start // GROUP)
        total += tl.dot(a, b) * scale[:, None]
    inside = (m[:, None] < rows) & (n[None, :] < OUT)
    tl.store(y + m[:, None].to(tl.int64) * OUT + n[None, :], total.to(y.dtype.element_ty), mask=inside)


def many_rows(x: Tensor, weight: Fp8Weight) -> Tensor:
    """Return x·weightᵀ [rows, out] for x [rows, in], quantised in groups of 128 columns, in two launches."""
    return product(quantize_rows(x), weight)


def product(x: QuantizedRows, weight: Fp8Weight) -> Tensor:
    """Return x·weightᵀ [rows, out], in x's dtype, for quantised rows x [rows, in]."""
    (rows, inner), out = x.values.shape, weight.values.shape[0]
    y = torch.empty((rows, out), dtype=x.dtype, device=x.values.device)
    block_m, block_n = (64, 128) if rows > 64 else (64, 64)
    grid = (triton.cdiv(rows, block_m) * triton.cdiv(out, block_n),)
    many_rows_kernel[grid](
        x.values, x.factors, weight.values, weight.scale_inv, y, rows, out, inner, x.factors.stride(1),
        BLOCK_M=block_m, BLOCK_N=block_n, BANDS=16, num_warps=4, num_stages=4, **starts_early(x.values),
    )  # fmt: skip
    return y
