"""RoPE types beyond "default": how transformers scales the frequencies for contexts longer than trained.

"linear": Chen et al., Extending Context Window … via Position Interpolation, 2023. "llama3": the Llama 3.1 release.
"yarn": Peng et al., YaRN, 2023. "longrope": Ding et al., LongRoPE, 2024, with the factors for sequences within the
original context. "dynamic" scales only longer sequences than the engine serves.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from minisgl.config import ConfigError
from minisgl.layers.attention import ROPE_TYPES, RopeConfig
from minisgl.models.config import number, positive

_NEEDS: dict[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
}
"""RoPE type → the parameters that have no default."""
_NULL_IS_DEFAULT = ("attention_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow")
"""Parameters that may be null or 0, which means that they are not given."""


@dataclass(frozen=True, slots=True)
class ScaledRope(RopeConfig):
    """The parameters of a type that scales the frequencies. llama3, yarn and longrope need the original context."""

    factor: float = 1.0
    original_max_position_embeddings: int = 0  # the context length before it was extended
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] = ()  # longrope
    long_factor: tuple[float, ...] = ()

    def max_len(self, max_position_embeddings: int) -> int:
        """Return the longest sequence that the model supports, in tokens.

        Linear and YaRN scaling extend the context. With longrope, it is the original context length: transformers
        computes longer sequences, from their first token on, with other angles than shorter ones, so they could not
        share pages of the prefix cache.
        """
        original = self.original_max_position_embeddings
        if self.rope_type in ("linear", "yarn"):
            return max(max_position_embeddings, int(original * self.factor))
        return min(max_position_embeddings, original) if self.rope_type == "longrope" else max_position_embeddings

    @property
    def why_no_longer(self) -> str:
        """Why dynamic and longrope scaling allow no longer sequence."""
        if self.rope_type not in ("dynamic", "longrope"):
            return ""
        return (
            f"Its RoPE scaling ({self.rope_type}) rotates every token of a longer sequence by other angles, so it "
            "could not share pages of the prefix cache with shorter ones."
        )

    def scale(self, inv_freq: Tensor) -> tuple[Tensor, float]:
        """Return the scaled frequencies, and the factor for cosines and sines."""
        if self.rope_type == "linear":
            return inv_freq / self.factor, 1.0
        if self.rope_type == "llama3":
            return _llama3(inv_freq, self), 1.0
        if self.rope_type == "yarn":
            return _yarn(inv_freq, self), _yarn_attention_factor(self)
        return _longrope(inv_freq, self) if self.rope_type == "longrope" else (inv_freq, 1.0)


def read(rope: dict[str, Any], length: int) -> ScaledRope:
    """Return the parameters ``rope`` of a type, with the defaults of transformers for those that are missing.

    ``length`` is ``max_position_embeddings``. Raises `ConfigError` if a parameter has a wrong type, or is missing and
    has no default.
    """
    kind = rope["rope_type"]
    missing = [key for key in _NEEDS[kind] if key not in rope]
    if missing:
        raise ConfigError(f"rope_type {kind!r} needs {', '.join(missing)}, which config.json lacks.")
    if kind in ("yarn", "longrope") and rope.get("factor") is None:
        rope["factor"] = length / positive(rope, "original_max_position_embeddings")
    values: dict[str, Any] = {"rope_type": kind}
    for name in [f.name for f in fields(ScaledRope)[1:]]:
        if name == "original_max_position_embeddings":
            values[name] = positive(rope, name) if kind in ("llama3", "yarn", "longrope") else length
        elif name in ("short_factor", "long_factor") and name in rope:
            values[name] = _numbers(rope, name)
        elif name in rope and (rope[name] or name not in _NULL_IS_DEFAULT):
            values[name] = bool(rope[name]) if name == "truncate" else number(rope, name, 0.0)
    return ScaledRope(**values)


def _numbers(rope: Mapping[str, Any], key: str) -> tuple[float, ...]:
    """Return the list of numbers ``rope[key]``. Raises `ConfigError` if it is not one."""
    values = rope[key]
    if not isinstance(values, list) or not all(isinstance(value, (int, float)) for value in values):
        raise ConfigError(f"{key} of the RoPE parameters must be a list of numbers, got {values!r}.")
    return tuple(values)


def _llama3(inv_freq: Tensor, rope: ScaledRope) -> Tensor:
    """Scale the frequencies as Llama 3.1 does.

    Low frequencies (long wavelengths) are divided by ``factor``, high frequencies are kept, and those between are
    interpolated.
    """
    turns = rope.original_max_position_embeddings * inv_freq / (2 * math.pi)  # rotations within the original context
    kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = kept.clamp(0, 1)
    return (1 - kept) * inv_freq / rope.factor + kept * inv_freq


def _yarn(inv_freq: Tensor, rope: ScaledRope) -> Tensor:
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


def _yarn_attention_factor(rope: ScaledRope) -> float:
    """Return the factor for cosines and sines that sharpens attention in an extended context (YaRN, section 3.4)."""
    if rope.attention_factor is not None:
        return rope.attention_factor

    def mscale(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)


def _longrope(inv_freq: Tensor, rope: ScaledRope) -> tuple[Tensor, float]:
    """Divide each frequency by its factor for short sequences; also return the factor for cosines and sines."""
    if len(rope.short_factor) != len(inv_freq):
        raise ConfigError(f"short_factor of longrope has {len(rope.short_factor)} numbers, expected {len(inv_freq)}.")
    scale = rope.attention_factor
    if scale is None:
        length = rope.original_max_position_embeddings
        scale = 1.0 if rope.factor <= 1 else math.sqrt(1 + math.log(rope.factor) / math.log(length))
    return inv_freq / torch.tensor(rope.short_factor, dtype=torch.float32), scale


ROPE_TYPES |= dict.fromkeys(_NEEDS, read)
