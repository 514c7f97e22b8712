"""RoPE types beyond "default" and "linear": how transformers scales the frequencies for contexts longer than trained.

"llama3": the Llama 3.1 release. "yarn": Peng et al., YaRN, 2023. "longrope": Ding et al., LongRoPE, 2024, with the
factors for sequences within the original context. "dynamic" scales only longer sequences than the engine serves.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from minisgl.config import ConfigError
from minisgl.layers.attention import SCALINGS, RopeConfig


def _llama3(inv_freq: Tensor, rope: RopeConfig) -> Tensor:
    """Scale the frequencies as Llama 3.1 does.

    Low frequencies (long wavelengths) are divided by ``factor``, high frequencies are kept, and those between are
    interpolated.
    """
    turns = rope.original_max_position_embeddings * inv_freq / (2 * math.pi)  # rotations within the original context
    kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = kept.clamp(0, 1)
    return (1 - kept) * inv_freq / rope.factor + kept * inv_freq


def _yarn(inv_freq: Tensor, rope: RopeConfig) -> Tensor:
    """Scale the frequencies as YaRN does.

    Pairs that rotate more than ``beta_fast`` times within the original context are kept; pairs that rotate less than
    ``beta_slow`` times are divided by ``factor``; the pairs between are interpolated linearly over the pair number.
    """
    pairs = len(inv_freq)

    def pair_with_turns(turns: float) -> float:
        length = rope.original_max_position_embeddings
        return pairs * math.log(length / (turns * 2 * math.pi)) / math.log(rope.rope_theta)

    low, high = pair_with_turns(rope.beta_fast), pair_with_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    stretched = (torch.arange(pairs, dtype=torch.float32) - low) / max(high - low, 0.001)
    stretched = stretched.clamp(0, 1)
    return stretched * inv_freq / rope.factor + (1 - stretched) * inv_freq


def _yarn_attention_factor(rope: RopeConfig) -> float:
    """Return the factor for cosines and sines that sharpens attention in an extended context (YaRN, section 3.4)."""
    if rope.attention_factor is not None:
        return rope.attention_factor

    def mscale(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)


def _longrope(inv_freq: Tensor, rope: RopeConfig) -> tuple[Tensor, float]:
    """Divide each frequency by its factor for short sequences; also return the factor for cosines and sines."""
    if len(rope.short_factor) != len(inv_freq):
        raise ConfigError(f"short_factor of longrope has {len(rope.short_factor)} numbers, expected {len(inv_freq)}.")
    scale = rope.attention_factor
    if scale is None:
        length = rope.original_max_position_embeddings
        scale = 1.0 if rope.factor <= 1 else math.sqrt(1 + math.log(rope.factor) / math.log(length))
    return inv_freq / torch.tensor(rope.short_factor, dtype=torch.float32), scale


SCALINGS |= {
    "dynamic": SCALINGS["default"],
    "llama3": lambda inv_freq, rope: (_llama3(inv_freq, rope), 1.0),
    "yarn": lambda inv_freq, rope: (_yarn(inv_freq, rope), _yarn_attention_factor(rope)),
    "longrope": _longrope,
}
