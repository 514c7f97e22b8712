"""Gumbel noise and argmax in one pass over the logits, and token masks, in Triton.

The torch references are `minisgl.engine.gumbel.draw` and `minisgl.engine.logits_processors.mask_tokens`. The
noise is bit-identical to that of `minisgl.engine.gumbel` on a GPU: both use the same integer hash, and CUDA's log1p
and log.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from minisgl.plugins.kernels.ops.triton.device import device_function
from minisgl.plugins.kernels.ops.triton.early import start_next, starts_early, wait_for_previous

BLOCK = 2048
GOLDEN = tl.constexpr(0x9E3779B9 - (1 << 32))


@device_function
def mix(x):
    """Hash int32 to int32, as `minisgl.engine.gumbel.mix_` does."""
    x ^= (x >> 16) & 0xFFFF
    x *= 0x7FEB352D
    x ^= (x >> 15) & 0x1FFFF
    x *= 0x846CA68B - (1 << 32)
    x ^= (x >> 16) & 0xFFFF
    return x


@device_function
def row_numbers(key, position):
    """Return the two int32 numbers from which, with the tokens' hashes, a row's noise is computed.

    ``key`` points to the row's two int32 of key, ``position`` to its int32 position.
    """
    key0, key1 = tl.load(key), tl.load(key + 1)
    position_hash = mix(tl.load(position) * GOLDEN + key0)
    return mix(position_hash ^ key1), mix(position_hash + key1) | 1


@device_function
def log1p(x):
    """Return log(1 + x), corrected for the rounding of 1 + x (Goldberg, 1991, theorem 4)."""
    y = 1.0 + x
    return tl.where(y == 1.0, x, tl.log(y) * x / tl.where(y == 1.0, 1.0, y - 1.0))


@device_function
def gumbel(hashes, low, odd, INTERPRETED: tl.constexpr):
    """Return standard Gumbel noise from the tokens' hashes and `row_numbers`, as in `minisgl.engine.gumbel`."""
    bits = mix((hashes ^ low) * odd)
    u = ((bits >> 1) & 0x7FFFFFFF).to(tl.float32) * 4.656612873077393e-10 + 2.3283064365386963e-10  # 2^-31, 2^-32
    u = tl.minimum(u, 1.0 - 5.960464477539063e-08)  # 2^-24
    if INTERPRETED:  # the interpreter has no libdevice
        return -tl.log(-log1p(-u))
    return -libdevice.log(-libdevice.log1p(-u))


@triton.jit(do_not_specialize_on_alignment=["req_pool_indices", "positions"])
def gumbel_argmax_kernel(
    logits, table, req_pool_indices, positions, hashes, best, best_token, vocab, share, stride_logits, stride_table,
    NOISY: tl.constexpr, SCALED: tl.constexpr, BLOCK: tl.constexpr, INTERPRETED: tl.constexpr,
    EARLY: tl.constexpr = False,
):  # fmt: skip
    """Find the best token of one share of the vocabulary for one row. One program: one row, one share."""
    row, split = tl.program_id(0), tl.program_id(1)
    if EARLY:
        start_next()
        wait_for_previous()
    if NOISY:
        asked = table + tl.load(req_pool_indices + row) * stride_table
        low, odd = row_numbers(asked, positions + row)
        temperature = tl.load(asked + 2).to(tl.float32, bitcast=True)
    row_logits = logits + row.to(tl.int64) * stride_logits
    top = tl.full([], float("-inf"), tl.float32)
    token = tl.full([], 0, tl.int32) + split * share
    end = tl.minimum(split * share + share, vocab)
    for start in range(split * share, end, BLOCK):
        i = start + tl.arange(0, BLOCK)
        value = tl.load(row_logits + i, mask=i < end, other=float("-inf")).to(tl.float32)
        if SCALED:
            value = tl.div_rn(value, temperature)
        if NOISY:
            value += gumbel(tl.load(hashes + i, mask=i < end, other=0), low, odd, INTERPRETED)
        block_top, which = tl.max(value, 0, return_indices=True)
        token = tl.where(block_top > top, start + which, token)  # among equal values the smallest token id
        top = tl.maximum(top, block_top)
    tl.store(best + row * tl.num_programs(1) + split, top)
    tl.store(best_token + row * tl.num_programs(1) + split, token)


@triton.jit
def best_kernel(best, best_token, out, SPLITS: tl.constexpr, EARLY: tl.constexpr = False):
    """Write each row's best token over all SPLITS shares of the vocabulary. One program per row."""
    if EARLY:
        start_next()
        wait_for_previous()
    row, split = tl.program_id(0), tl.arange(0, SPLITS)
    which = tl.argmax(tl.load(best + row * SPLITS + split), 0)
    tl.store(out + row, tl.load(best_token + row * SPLITS + which).to(tl.int64))


def gumbel_argmax(
    logits: Tensor,
    table: Tensor | None = None,
    req_pool_indices: Tensor | None = None,
    positions: Tensor | None = None,
    hashes: Tensor | None = None,
    *,
    scaled: bool = False,
) -> Tensor:
    """Compute `minisgl.engine.gumbel.draw` on a GPU, or with ``logits`` alone the argmax without noise.

    logits [rows, vocab]; ``table`` is the sampling table, int32 [request-pool rows, 3 or more]: key, key, temperature
    bits. Returns token ids, int64 [rows].
    """
    rows, vocab = logits.shape
    # Enough programs to fill a GPU, each with work. The cut depends only on the vocabulary, not on the batch.
    splits = triton.next_power_of_2(min(32, triton.cdiv(vocab, 2 * BLOCK)))
    share = triton.cdiv(triton.cdiv(vocab, splits), 16) * 16
    best = torch.empty((rows, splits), dtype=torch.float32, device=logits.device)
    best_token = torch.empty((rows, splits), dtype=torch.int32, device=logits.device)
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    early = starts_early(logits)
    gumbel_argmax_kernel[(rows, splits)](
        logits, table, req_pool_indices, positions, hashes, best, best_token,
        vocab, share, logits.stride(0), 0 if table is None else table.stride(0),
        NOISY=table is not None, SCALED=scaled,
        BLOCK=min(BLOCK, triton.next_power_of_2(share)), INTERPRETED=not logits.is_cuda, num_warps=4, **early,
    )  # fmt: skip
    best_kernel[(rows,)](best, best_token, out, SPLITS=splits, num_warps=1, **early)
    return out


@triton.jit(do_not_specialize_on_alignment=["rows", "bits"])
def mask_tokens_kernel(logits, rows, bits, vocab, stride_logits, stride_bits, BLOCK: tl.constexpr):
    """Set forbidden tokens of one row to -inf. One program: one mask, one block of the vocabulary."""
    mask, token = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row_logits = logits + tl.load(rows + mask).to(tl.int64) * stride_logits
    words = tl.load(bits + mask * stride_bits + (token >> 5), mask=token < vocab, other=-1)
    forbidden = ((words >> (token & 31)) & 1) == 0
    tl.store(row_logits + token, float("-inf"), mask=forbidden & (token < vocab))


def mask_tokens(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    """Compute `minisgl.engine.logits_processors.mask_tokens` on a GPU. The logits must be contiguous in a row."""
    vocab = logits.shape[1]
    grid = (len(rows), triton.cdiv(vocab, BLOCK))
    mask_tokens_kernel[grid](logits, rows, bits, vocab, logits.stride(0), bits.stride(0), BLOCK=BLOCK, num_warps=4)
