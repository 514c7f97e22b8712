"""Products with FP8 weights in Triton: weight-only for few rows, and e4m3 times e4m3 for many rows.

A few rows are limited by the bytes of the weight. So activations stay in their dtype (weight-only), which saves the
launch that would quantise them. Many rows are limited by arithmetic, which in e4m3 is twice as fast as in 16 bits; the
sum over each 128 columns is scaled and added up in float32. `minisgl.kernel.fp8` has the layout and the torch
reference.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernel.fp8 import BLOCK, E4M3, Fp8Weight, blocks
from minisgl.kernel.triton.early import start_next, starts_early, wait_for_previous

GROUP = tl.constexpr(BLOCK)
LARGEST = tl.constexpr(448.0)
WARP_COLS = 128
"""Words of four numbers that a warp of `one_row_kernel` loads at once: 32 threads with 16 bytes each."""

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


@triton.jit
def add_products(total, words, x0, x1, x2, x3, PTX: tl.constexpr):
    """Return total + the sum of the products of x0 to x3 with the four e4m3 numbers of each word."""
    if PTX:
        w0, w1, w2, w3 = tl.inline_asm_elementwise(
            UNPACK, "=f,=f,=f,=f,r", [words], (tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1
        )
    else:  # Triton's interpreter. Shifted by one, the bits of e4m3 are those of float16, but for a factor of 2⁸.
        w0, w1 = half(words << 8), half(words)
        w2, w3 = half(words >> 8), half(words >> 16)
    return total + w0 * x0 + w1 * x1 + w2 * x2 + w3 * x3


@triton.jit
def half(words):
    """Return the second byte of each word, an e4m3 number, as float32."""
    bits = (words & 0x8000) | ((words & 0x7F00) >> 1)
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0


@triton.jit
def bfloat(high):
    """Return the bfloat16 numbers in the upper halves of words, whose lower halves are 0, as float32."""
    return high.to(tl.float32, bitcast=True)


@triton.jit
def one_row_kernel(
    x, weight, scale_inv, y, WORDS: tl.constexpr, COLS: tl.constexpr, PTX: tl.constexpr, EARLY: tl.constexpr = False
):  # fmt: skip
    """Compute 4 outputs of a product with one row of x. A warp: 4 rows of the weight, and 128 of COLS words.

    The weight is read as words of four e4m3 numbers: Triton would unpack a tile of e4m3 that is loaded one iteration
    ahead to one register for each number. x is read as words of four bfloat16 numbers, with offsets as large as a tile
    of the weight. So each thread loads the elements for its own weights, and no data passes between threads before the
    sums at the end. x is not loaded ahead: Triton would keep it in another layout, and exchange the weights.
    """
    k = tl.arange(0, COLS)[None, :]
    n = tl.program_id(0) * 4
    weight += n.to(tl.int64) * WORDS + k
    scale_inv += n // GROUP * tl.cdiv(WORDS * 4, GROUP) + k * 4 // GROUP
    real = k < WORDS
    w0 = tl.load(weight, mask=real, other=0)
    w1 = tl.load(weight + WORDS, mask=real, other=0)
    w2 = tl.load(weight + 2 * WORDS, mask=real, other=0)
    w3 = tl.load(weight + 3 * WORDS, mask=real, other=0)
    if EARLY:
        start_next()
        wait_for_previous()
    total0 = tl.zeros([1, COLS], tl.float32)
    total1, total2, total3 = total0, total0, total0
    for start in range(0, WORDS, COLS):
        here, after = start + k < WORDS, start + COLS + k < WORDS
        next0 = tl.load(weight + start + COLS, mask=after, other=0)
        next1 = tl.load(weight + WORDS + start + COLS, mask=after, other=0)
        next2 = tl.load(weight + 2 * WORDS + start + COLS, mask=after, other=0)
        next3 = tl.load(weight + 3 * WORDS + start + COLS, mask=after, other=0)
        scale = tl.load(scale_inv + start * 4 // GROUP, mask=here, other=0.0)
        a = tl.load(x + start + k, mask=here, other=0)
        lower, upper = a.to(tl.int32), (a >> 32).to(tl.int32)
        x0, x1 = bfloat(lower << 16) * scale, bfloat(lower & -65536) * scale
        x2, x3 = bfloat(upper << 16) * scale, bfloat(upper & -65536) * scale
        total0 = add_products(total0, w0, x0, x1, x2, x3, PTX)
        total1 = add_products(total1, w1, x0, x1, x2, x3, PTX)
        total2 = add_products(total2, w2, x0, x1, x2, x3, PTX)
        total3 = add_products(total3, w3, x0, x1, x2, x3, PTX)
        w0, w1, w2, w3 = next0, next1, next2, next3
    y += n + tl.arange(0, 1)
    tl.store(y, tl.sum(total0, 1).to(y.dtype.element_ty))
    tl.store(y + 1, tl.sum(total1, 1).to(y.dtype.element_ty))
    tl.store(y + 2, tl.sum(total2, 1).to(y.dtype.element_ty))
    tl.store(y + 3, tl.sum(total3, 1).to(y.dtype.element_ty))


def serves_one_row(x: Tensor, weight: Fp8Weight) -> bool:
    """Return whether `one_row` supports these: one row in bfloat16, whole tiles, and aligned rows of the weight."""
    out, inner = weight.values.shape
    aligned = x.data_ptr() % 16 == weight.values.data_ptr() % 16 == 0 == inner % 16 == out % 4
    return len(x) == 1 and x.dtype == torch.bfloat16 and x.stride(1) == 1 and aligned


def one_row(x: Tensor, weight: Fp8Weight) -> Tensor:
    """Return x·weightᵀ for one row: x [1, in] → [1, out]. Weight-only. See `serves_one_row`."""
    out, inner = weight.values.shape
    warps = 2
    y = torch.empty((1, out), dtype=x.dtype, device=x.device)
    one_row_kernel[(out // 4,)](
        x.flatten().view(torch.int64), weight.values.view(torch.int32), weight.scale_inv, y,
        WORDS=inner // 4, COLS=warps * WARP_COLS, PTX=not triton.knobs.runtime.interpret, num_warps=warps,
        **starts_early(x),
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


@triton.jit
def quantize_rows_kernel(x, values, factors, IN, stride_x, GROUPS: tl.constexpr, EARLY: tl.constexpr = False):
    """Quantise ``GROUPS`` groups of 128 columns of one row."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    col = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    if EARLY:
        start_next()
        wait_for_previous()
    a = tl.load(x + row * stride_x + col, mask=col < IN, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(a), 1)
    scale = tl.div_rn(tl.full([GROUPS], LARGEST, tl.float32), tl.where(largest > 0, largest, LARGEST))
    scaled = tl.clamp(a * scale[:, None], -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    tl.store(values + row * IN + col, scaled.to(values.dtype.element_ty), mask=col < IN)
    count = tl.cdiv(IN, GROUP)
    inverse = tl.div_rn(tl.full([GROUPS], 1.0, tl.float32), scale)
    tl.store(factors + row * count + group, inverse, mask=group < count)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `minisgl.kernel.fp8.quantize_rows` of x [rows, in]: e4m3 values [rows, in], factors [rows, groups]."""
    rows, inner = x.shape
    count = blocks(inner)
    values = torch.empty((rows, inner), dtype=E4M3, device=x.device)
    factors = torch.empty((rows, count), dtype=torch.float32, device=x.device)
    groups = min(8, triton.next_power_of_2(count))
    quantize_rows_kernel[(rows, triton.cdiv(count, groups))](
        x, values, factors, inner, x.stride(0), GROUPS=groups, num_warps=4, **starts_early(x)
    )
    return values, factors


@triton.jit(do_not_specialize=["rows"])
def many_rows_kernel(
    x, factors, weight, scale_inv, y, rows, OUT, IN,
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
    factors += m * tl.cdiv(IN, GROUP)
    scale_inv += (tile_n * BLOCK_N // GROUP) * tl.cdiv(IN, GROUP)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, IN, GROUP):
        real = start + k < IN
        a = tl.load(x_at + start, mask=(m[:, None] < rows) & real[None, :], other=0.0)
        b = tl.load(weight_at + start, mask=real[:, None] & (n[None, :] < OUT), other=0.0)
        scale = tl.load(factors + start // GROUP, mask=m < rows, other=0.0) * tl.load(scale_inv + start // GROUP)
        total += tl.dot(a, b) * scale[:, None]
    inside = (m[:, None] < rows) & (n[None, :] < OUT)
    tl.store(y + m[:, None].to(tl.int64) * OUT + n[None, :], total.to(y.dtype.element_ty), mask=inside)


def many_rows(x: Tensor, weight: Fp8Weight) -> Tensor:
    """Return x·weightᵀ [rows, out] for x [rows, in], quantised in groups of 128 columns, in two launches."""
    return product(*quantize_rows(x), weight, x.dtype)


def product(values: Tensor, factors: Tensor, weight: Fp8Weight, dtype: torch.dtype) -> Tensor:
    """Return the product [rows, out], in ``dtype``, of rows that `quantize_rows` quantised with a weight."""
    (rows, inner), out = values.shape, weight.values.shape[0]
    y = torch.empty((rows, out), dtype=dtype, device=values.device)
    block_m, block_n = (64, 128) if rows > 64 else (64, 64)
    grid = (triton.cdiv(rows, block_m) * triton.cdiv(out, block_n),)
    many_rows_kernel[grid](
        values, factors, weight.values, weight.scale_inv, y, rows, out, inner,
        BLOCK_M=block_m, BLOCK_N=block_n, BANDS=16, num_warps=4, num_stages=4, **starts_early(values),
    )  # fmt: skip
    return y
