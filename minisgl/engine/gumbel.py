"""Stateless random numbers for sampling: Gumbel noise as a pure function of (seed, position, token id).

With a stateful generator, a request's tokens would depend on the other requests in the batch, on its row and on how
often it was retracted. A counter-based generator (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011)
has no such dependence. The code uses torch's integer operations, which overflow in the same way on every device, and
knows nothing of requests.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum

import torch
from torch import Tensor


class Param(IntEnum):
    """The columns of the table of sampling parameters, int32 [request-pool rows, columns]."""

    SEED_LOW = 0  # the two words of the seed key, see `seed_key`
    SEED_HIGH = 1
    TEMPERATURE = 2  # the bits of a float32


_MASK64 = (1 << 64) - 1


def _i32(value: int) -> int:
    """Return the lowest 32 bits of ``value`` as a signed number, as torch.int32 requires."""
    value &= 0xFFFFFFFF
    return value - (1 << 32) if value >= 1 << 31 else value


_M1, _M2, _GOLDEN = _i32(0x7FEB352D), _i32(0x846CA68B), _i32(0x9E3779B9)


def seed_key(seed: int) -> tuple[int, int]:
    """Return two int32 key words for a 64-bit seed. splitmix64's finaliser gives close seeds unrelated keys."""
    z = (seed + 0x9E3779B97F4A7C15) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    z ^= z >> 31
    return _i32(z), _i32(z >> 32)


def mix_(x: Tensor) -> Tensor:
    """Hash an int32 tensor in place with a bijection of 32-bit words (C. Wellons' lowbias32).

    torch's right shift is arithmetic, so each shift is masked to make it logical.
    """
    x ^= (x >> 16) & 0xFFFF
    x *= _M1
    x ^= (x >> 15) & 0x1FFFF
    x *= _M2
    x ^= (x >> 16) & 0xFFFF
    return x


def token_hashes(vocab_size: int, device: torch.device) -> Tensor:
    """Return the hash of each token id, int32 [vocab]. All rows use the same hashes, so they are computed once."""
    return mix_(torch.arange(1, vocab_size + 1, dtype=torch.int32, device=device).mul_(_GOLDEN))


def gumbel(keys: Tensor, positions: Tensor, hashes: Tensor) -> Tensor:
    """Return standard Gumbel noise, float32 [rows, vocab].

    ``keys`` int32 [rows, 2] comes from `seed_key`, ``positions`` is int32 [rows], ``hashes`` comes from `token_hashes`.
    The argmax of ``logits + noise`` is a sample from softmax(logits) (the Gumbel-max trick).
    """
    row_hash = mix_(positions * _GOLDEN + keys[:, 0])
    low = mix_(row_hash ^ keys[:, 1])
    odd = mix_(row_hash + keys[:, 1]) | 1
    bits = (hashes ^ low[:, None]).mul_(odd[:, None])
    mix_(bits)
    # 31 random bits become u in (0, 1); the smallest u is 2^-32. Noise is -log(E) with E = -log(1 - u). This form of E
    # is precise for small E, that is for large noise, which decides the argmax. u stays below 1: no noise is -inf.
    u = bits.bitwise_right_shift_(1).bitwise_and_(0x7FFFFFFF).to(torch.float32)
    u.mul_(2.0**-31).add_(2.0**-32).clamp_(max=1.0 - 2.0**-24)
    return u.neg_().log1p_().neg_().log_().neg_()


def draw(
    logits: Tensor, table: Tensor, req_pool_indices: Tensor, positions: Tensor, hashes: Tensor, *, scaled: bool = True,
    noise: Callable[..., Tensor] = gumbel,
) -> Tensor:  # fmt: skip
    """Sample a token for each row: argmax(logits / temperature + noise), int64 [rows].

    ``logits`` [rows, vocab] of any float dtype are converted to float32. ``table`` int32 [request-pool rows, 3]
    holds the seed key and the temperature, above 0: see `Param`. If ``scaled`` is False, the logits
    are not divided by the temperature. ``req_pool_indices`` int32 [rows] selects a row of ``table`` for each row of
    logits. ``positions`` and ``hashes`` are as in `gumbel`, which ``noise`` may replace.
    """
    params, logits = table.index_select(0, req_pool_indices), logits.float()
    if scaled:
        logits = logits / params[:, Param.TEMPERATURE, None].view(torch.float32)
    return noise(params[:, : Param.TEMPERATURE], positions, hashes).add_(logits).argmax(dim=1)
