"""Rotary position embedding (RoPE): the table of cosines and sines of all positions.

This module computes the table once, in float32. `minisgl.attention.rotate` applies it to queries and keys. Pages of the
prefix cache are shared by sequences of any length, so an angle may depend on the position only, not on the length of
the sequence. The types "dynamic" and "longrope" obey this rule up to their original context length:
`minisgl.models.config.ModelConfig.max_len` is not longer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from minisgl.config import ConfigError

__all__ = ["SCALINGS", "RoPE", "RopeConfig", "frequencies"]


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


SCALINGS: dict[str, Callable[[Tensor, RopeConfig], tuple[Tensor, float]]] = {
    "default": lambda inv_freq, rope: (inv_freq, 1.0),
    "linear": lambda inv_freq, rope: (inv_freq / rope.factor, 1.0),
}
"""RoPE type → the frequencies that it makes of the plain ones, and the factor for cosines and sines.

"linear": Chen et al., Extending Context Window … via Position Interpolation, 2023. The file
`plugins/models/rope_scaling.py` adds the other types of transformers.
"""


def frequencies(rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """Return the angle per position of each of the head_dim/2 pairs, and a factor for cosines and sines.

    The angles are float32 [head_dim/2], in radians. Su et al., RoFormer, 2021. Raises ConfigError for a type that is
    not in `SCALINGS`, if a head is rotated in part, or for an odd ``head_dim``.
    """
    if rope.partial_rotary_factor != 1.0:
        raise ConfigError(
            f"partial_rotary_factor={rope.partial_rotary_factor} is not supported: every dimension of a head must be "
            "rotated, unless a plugin brings its own rotation."
        )
    if head_dim % 2:
        raise ConfigError(f"head_dim={head_dim} is odd, but RoPE rotates pairs of dimensions.")
    if rope.rope_type == "per_layer_type":
        raise ConfigError(
            "rope_parameters differ by layer type, which is not supported: a plugin must build a table for each type "
            "from ModelConfig.rope_by_layer_type."
        )
    if rope.rope_type not in SCALINGS:
        *known, last = SCALINGS
        raise ConfigError(f"rope_type {rope.rope_type!r} is not supported: use {', '.join(known)} or {last}.")
    inv_freq = 1.0 / (rope.rope_theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    return SCALINGS[rope.rope_type](inv_freq, rope)


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
