"""Rotary position embedding (RoPE): the table of cosines and sines of all positions, for six kinds of scaling.

This module computes the table once, in float32. `minisgl.attention.rotate` applies it to queries and keys. Pages of the
prefix cache are shared by sequences of any length, so an angle may depend on the position only, not on the length of
the sequence. The types "dynamic" and "longrope" obey this rule up to their original context length:
`minisgl.models.config.ModelConfig.max_len` is not longer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from minisgl.config import ConfigError

__all__ = ["RoPE", "RopeConfig", "frequencies"]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """The RoPE parameters of config.json, under Hugging Face's names.

    ``original_max_position_embeddings`` is the context length before it was extended; llama3, yarn and longrope need
    it. ``rope_type`` may be a type that only a plugin knows: `frequencies` refuses it.
    """

    rope_type: str = "default"
    rope_theta: float = 10_000.0
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    partial_rotary_factor: float = 1.0  # the rotated part of a head; `frequencies` refuses all but 1
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


def frequencies(rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """Return the angle per position of each of the head_dim/2 pairs, and a factor for cosines and sines.

    The angles are float32 [head_dim/2], in radians.
    Su et al., RoFormer, 2021; "linear": Chen et al., Extending Context Window … via Position Interpolation, 2023;
    "llama3": the Llama 3.1 release; "yarn": Peng et al., YaRN, 2023; "longrope": Ding et al., LongRoPE, 2024, with the
    factors for sequences within the original context. "dynamic" scales only longer sequences. Raises ConfigError for
    another type, if a head is rotated in part, or for an odd ``head_dim``.
    """
    if rope.partial_rotary_factor != 1.0:
        raise ConfigError(
            f"partial_rotary_factor={rope.partial_rotary_factor} is not supported: every dimension of a head must be "
            "rotated, unless a plugin brings its own rotation."
        )
    if head_dim % 2:
        raise ConfigError(f"head_dim={head_dim} is odd, but RoPE rotates pairs of dimensions.")
    inv_freq = 1.0 / (rope.rope_theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    match rope.rope_type:
        case "default" | "dynamic":
            return inv_freq, 1.0
        case "linear":
            return inv_freq / rope.factor, 1.0
        case "llama3":
            return _llama3(inv_freq, rope), 1.0
        case "yarn":
            return _yarn(inv_freq, rope), _yarn_attention_factor(rope)
        case "longrope":
            return _longrope(inv_freq, rope)
        case "per_layer_type":
            raise ConfigError(
                "rope_parameters differ by layer type, which is not supported: a plugin must build a table for each "
                "type from ModelConfig.rope_by_layer_type."
            )
    known = "default, linear, dynamic, llama3, yarn or longrope"
    raise ConfigError(f"rope_type {rope.rope_type!r} is not supported: use {known}.")


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


class RoPE(nn.Module):
    """The RoPE table of a model, [positions, head_dim] float32: cosines, then sines. All layers share one table."""

    def __init__(self, rope: RopeConfig, head_dim: int, positions: int, device: torch.device):
        super().__init__()
        inv_freq, scale = frequencies(rope, head_dim)
        angles = torch.arange(positions, dtype=torch.float32, device=device)[:, None] * inv_freq.to(device)
        self.cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1).mul_(scale)

    def forward(self, positions: Tensor) -> Tensor:
        """Return the cosines and sines [n, head_dim], float32, of positions [n]."""
        return self.cos_sin.index_select(0, positions)
