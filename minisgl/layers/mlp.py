"""The gated MLP of a decoder layer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from minisgl.config import ConfigError
from minisgl.layers.context import Context
from minisgl.layers.linear import LinearColParallelMerged, LinearRowParallel
from minisgl.plugins.kernels.ops.activation import ACTS, Act, act_and_mul, act_and_mul_quantized
from minisgl.plugins.kernels.ops.fp8 import QuantizedRows
from minisgl.plugins.kernels.ops.gated import gated_linear

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

    def takes_quantized(self, rows: int) -> bool:
        """Return whether `forward` takes ``rows`` tokens as `QuantizedRows`."""
        return self.gate_up_proj.takes_quantized(rows)

    def forward(self, x: Tensor | QuantizedRows) -> Tensor:
        """Compute the MLP of x [tokens, hidden]; returns a partial sum [tokens, hidden]."""
        if isinstance(x, Tensor) and x.device.type == "cpu" and len(x) > CPU_ROWS:
            return torch.cat([self.forward(rows) for rows in x.split(CPU_ROWS)])
        out: Tensor = self.down_proj(self._inner(x))
        return out

    def _inner(self, x: Tensor | QuantizedRows) -> Tensor | QuantizedRows:
        """Return act(gate(x))·up(x), quantised if the down projection takes that."""
        merged = self.gate_up_proj
        if merged.bias is None:
            inner = _gated(merged, x, self.act_name)
            if inner is not None:
                return inner
        if self.down_proj.takes_quantized(len(x)):
            return act_and_mul_quantized(merged(x), self.act_name)
        return self.act(merged(x))


def _gated(merged: LinearColParallelMerged, x: Tensor | QuantizedRows, act: Act) -> Tensor | None:
    """Return act(gate(x))·up(x), computed in one launch, or None if that is not faster or not supported."""
    if merged.fp8 is not None:
        return merged.fp8.forward_gated(x, act)
    assert isinstance(x, Tensor)
    return gated_linear(x, merged.weight, act)
