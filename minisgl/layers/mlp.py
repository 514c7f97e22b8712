"""The gated MLP of a decoder layer. Shazeer, GLU Variants Improve Transformer, 2020."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from minisgl.config import ConfigError
from minisgl.layers.context import Context
from minisgl.layers.linear import LinearColParallelMerged, LinearRowParallel


def silu_and_mul(x: Tensor) -> Tensor:
    """Return silu(gate)·up [..., dim] for x [..., 2·dim]; the gate half comes first."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def gelu_and_mul(x: Tensor, approximate: str = "none") -> Tensor:
    """Return gelu(gate)·up [..., dim] for x [..., 2·dim]. ``approximate`` is torch's: "none" or "tanh"."""
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate, approximate=approximate).mul_(up)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu_and_mul,
    "gelu": gelu_and_mul,
    "gelu_pytorch_tanh": partial(gelu_and_mul, approximate="tanh"),
}
"""Hugging Face's ``hidden_act`` → the gated activation: [..., 2·dim] → [..., dim]."""


def activation(name: str) -> Callable[[Tensor], Tensor]:
    """Return the gated activation for Hugging Face's ``hidden_act`` name. Raises ConfigError for an unknown name."""
    if name not in ACTIVATIONS:
        raise ConfigError(f"hidden_act {name!r} is not supported: use {', '.join(ACTIVATIONS)}.")
    return ACTIVATIONS[name]


class GatedMLP(nn.Module):
    """down(act(gate(x))·up(x)), with the inner dimension split over the ranks. The output is a partial sum."""

    def __init__(self, hidden_size: int, inner_size: int, act: str, ctx: Context, *, bias: bool = False):
        super().__init__()
        names = ("gate_proj", "up_proj")
        self.gate_up_proj = LinearColParallelMerged(hidden_size, (inner_size,) * 2, names, ctx, bias=bias)
        self.act, self.act_name = activation(act), act
        self.down_proj = LinearRowParallel(inner_size, hidden_size, ctx, bias=bias, reduce=False)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the MLP of x [tokens, hidden]; returns a partial sum [tokens, hidden]."""
        out: Tensor = self.down_proj(self.act(self.gate_up_proj(x)))
        return out
