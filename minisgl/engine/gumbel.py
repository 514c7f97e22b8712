"""Random numbers without a state: Gumbel noise as a pure function of (seed, position, token id).

A stateful generator would make a request's tokens depend on its neighbours, on its row and on how often it was
retracted. A counter-based one (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) does not. Knows
torch's integer operations, which wrap alike on every device, and nothing of requests.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK64 = (1 << 64) - 1


def _i32(value: int) -> int:
    """A 32-bit pattern as the signed number that torch wants."""
    value &= 0xFFFFFFFF
    return value - (1 << 32) if value >= 1 << 31 else value


_M1, _M2, _GOLDEN = _i32(0x7FEB352D), _i32(0x846CA68B), _i32(0x9E3779B9)


def seed_key(seed: int) -> tuple[int, int]:
    """Two int32 of key for a 64-bit seed, by splitmix64's finaliser: close seeds get unrelated keys."""
    z = (seed + 0x9E3779B97F4A7C15) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    z ^= z >> 31
    return _i32(z), _i32(z >> 32)


def mix_(x: Tensor) -> Tensor:
    """Hash int32 to int32 in place, a bijection (C. Wellons' lowbias32). Shifts are masked: torch's are arithmetic."""
    x ^= (x >> 16) & 0xFFFF
    x *= _M1
    x ^= (x >> 15) & 0x1FFFF
    x *= _M2
    x ^= (x >> 16) & 0xFFFF
    return x


def token_hashes(vocab_size: int, device: torch.device) -> Tensor:
    """[vocab] int32: each token id's hash, the same for every row; made once."""
    return mix_(torch.arange(1, vocab_size + 1, dtype=torch.int32, device=device).mul_(_GOLDEN))


def gumbel(keys: Tensor, positions: Tensor, hashes: Tensor) -> Tensor:
    """Standard Gumbel noise, float32 [rows, vocab].

    ``keys`` int32 [rows, 2] from `seed_key`, ``positions`` int32 [rows], ``hashes`` from `token_hashes`. The argmax of
    ``logits + noise`` is a draw from softmax(logits) (the Gumbel-max trick).
    """
    place = mix_(positions * _GOLDEN + keys[:, 0])
    low = mix_(place ^ keys[:, 1])
    odd = mix_(place + keys[:, 1]) | 1
    bits = (hashes ^ low[:, None]).mul_(odd[:, None])
    mix_(bits)
    # 31 random bits as u in (0, 1), smallest 2^-32. E = -log(1 - u) keeps its precision where E is small, that is for
    # the large noise which decides; u is held below 1 so that no token gets -inf.
    u = bits.bitwise_right_shift_(1).bitwise_and_(0x7FFFFFFF).to(torch.float32)
    u.mul_(2.0**-31).add_(2.0**-32).clamp_(max=1.0 - 2.0**-24)
    return u.neg_().log1p_().neg_().log_().neg_()


def draw(
    logits: Tensor, table: Tensor, slots: Tensor, positions: Tensor, hashes: Tensor, *, scaled: bool = True
) -> Tensor:
    """argmax(logits / temperature + noise), int64 [rows].

    logits [rows, vocab], of which float32 is made; ``table`` int32 [slots, 3 or more] has each slot's key and, as
    float32's bits, its temperature, above 0 (unless ``scaled``, it is not looked at); slots int32 [rows]; the others
    are `gumbel`'s. On a GPU the noise is made while the logits are read, once, and never stored; of equal ones that
    kernel takes the smallest token id.
    """
    if logits.is_cuda:
        from minisgl.kernel.triton.sampling import gumbel_argmax

        return gumbel_argmax(logits, table, slots, positions, hashes, scaled=scaled)
    return draw_torch(logits, table, slots, positions, hashes, scaled=scaled)


def draw_torch(
    logits: Tensor, table: Tensor, slots: Tensor, positions: Tensor, hashes: Tensor, *, scaled: bool = True
) -> Tensor:
    """`draw`, with the noise of all tokens in memory: what a CPU runs, and the kernel's twin."""
    asked, logits = table.index_select(0, slots), logits.float()
    if scaled:
        logits = logits / asked[:, 2:3].view(torch.float32)
    return gumbel(asked[:, :2], positions, hashes).add_(logits).argmax(dim=1)


def argmax(logits: Tensor) -> Tensor:
    """The likeliest token of each row, int64 [rows], as `draw` would choose it without noise."""
    if logits.is_cuda:
        from minisgl.kernel.triton.sampling import gumbel_argmax

        return gumbel_argmax(logits)
    return logits.argmax(dim=1)
