"""The gated MLP of a decoder layer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from minisgl.config import ConfigError
from minisgl.kernel.activation import ACTS, act_and_mul
from minisgl.kernel.gated import gated_linear
from minisgl.layers.context import Context
from minisgl.layers.linear import LinearColParallelMerged, LinearRowParallel

CPU_ROWS = 1024
"""The most tokens whose MLP a CPU computes at a time, so that the gate-and-up results stay in its cache. Without the
limit, a step of 8192 tokens spent a fifth of its time on first-touch allocation of memory for these activations.
"""

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {name: partial(act_and_mul, act=act) for name, act in ACTS.items()}
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
        self.act, self.act_name = activation(act), ACTS[act]
        self.down_proj = LinearRowParallel(inner_size, hidden_size, ctx, bias=bias, reduce=False)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the MLP of x [tokens, hidden]; returns a partial sum [tokens, hidden]."""
        if x.device.type == "cpu" and len(x) > CPU_ROWS:
            return torch.cat([self.forward(rows) for rows in x.split(CPU_ROWS)])
        merged = self.gate_up_proj
        fused = merged.bias is None and merged.fp8 is None
        inner = gated_linear(x, merged.weight, self.act_name) if fused else None
        out: Tensor = self.down_proj(self.act(merged(x)) if inner is None else inner)
        return out
