"""Rotary position embedding: the angle that each position turns each pair of dimensions by, for four scalings.

Makes the table once, in float32; minisgl.kernel.rope applies it.
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
    """What config.json says of RoPE, under Hugging Face's names. ``original_max_position_embeddings`` is the length
    the model was first trained for; llama3 and yarn need it."""

    rope_type: str = "default"
    rope_theta: float = 10_000.0
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


def frequencies(rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """Radians a position turns each of head_dim/2 pairs by (float32), and a factor for the cosines and sines.

    Su et al., RoFormer, 2021; "linear": Chen et al., Extending Context Window … via Position Interpolation, 2023;
    "llama3": the Llama 3.1 release; "yarn": Peng et al., YaRN, 2023. Raises ConfigError for another type.
    """
    inv_freq = 1.0 / (rope.rope_theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    match rope.rope_type:
        case "default":
            return inv_freq, 1.0
        case "linear":
            return inv_freq / rope.factor, 1.0
        case "llama3":
            return _llama3(inv_freq, rope), 1.0
        case "yarn":
            return _yarn(inv_freq, rope), _yarn_attention_factor(rope)
    raise ConfigError(f"rope_type {rope.rope_type!r} is not supported: use default, linear, llama3 or yarn.")


def _llama3(inv_freq: Tensor, rope: RopeConfig) -> Tensor:
    """Long waves are stretched by ``factor``, short ones kept, those between blended."""
    waves = rope.original_max_position_embeddings * inv_freq / (2 * math.pi)  # turns in the original context
    kept = (waves - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = kept.clamp(0, 1)
    return (1 - kept) * inv_freq / rope.factor + kept * inv_freq


def _yarn(inv_freq: Tensor, rope: RopeConfig) -> Tensor:
    """Pairs that turn more than beta_fast times in the original context are kept, those that turn less than
    beta_slow times are stretched, with a linear ramp over the pairs between."""
    pairs = len(inv_freq)

    def pair_that_turns(times: float) -> float:
        length = rope.original_max_position_embeddings
        return pairs * math.log(length / (times * 2 * math.pi)) / math.log(rope.rope_theta)

    low, high = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    stretched = (torch.arange(pairs, dtype=torch.float32) - low) / max(high - low, 0.001)
    stretched = stretched.clamp(0, 1)
    return stretched * inv_freq / rope.factor + (1 - stretched) * inv_freq


def _yarn_attention_factor(rope: RopeConfig) -> float:
    """Makes up for the flatter attention of a stretched context (YaRN, section 3.4)."""
    if rope.attention_factor is not None:
        return rope.attention_factor

    def mscale(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)


class RoPE(nn.Module):
    """The table of a model, [positions, head_dim] float32: cosines, then sines. One serves all layers."""

    def __init__(self, rope: RopeConfig, head_dim: int, positions: int, device: torch.device):
        super().__init__()
        inv_freq, scale = frequencies(rope, head_dim)
        angles = torch.arange(positions, dtype=torch.float32, device=device)[:, None] * inv_freq.to(device)
        self.cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1).mul_(scale)

    def forward(self, positions: Tensor) -> Tensor:
        """positions [n] → cosines and sines [n, head_dim], float32."""
        return self.cos_sin.index_select(0, positions)
