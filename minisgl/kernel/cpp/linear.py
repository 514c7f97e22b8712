"""The matrix product of a linear layer on a CPU, in C++ (`linear.cpp`)."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from minisgl.config import ConfigError
from minisgl.kernel.cpp import load
from minisgl.kernel.huge_pages import Arena
from minisgl.kernel.launch import one_launch

MULTIPLE = 16
"""Both sizes of a weight must be multiples of this number."""

FEW_ROWS = 12
"""Up to this number of rows the weights are read in place. With more rows they are rearranged, panel by panel."""

_arena = Arena(16 << 20)  # of packed weights


@functools.cache
def compiled() -> Any:
    """Compile and load the library. Return it, or None if it can't be compiled here."""
    try:
        return load("linear.cpp", native=True)
    except ConfigError:
        return None


def serves(weight: Tensor) -> bool:
    """Return whether `linear` can multiply with ``weight`` on this machine. The first call may compile."""
    if weight.device.type != "cpu" or weight.dtype not in (torch.bfloat16, torch.float32):
        return False
    if weight.shape[0] % MULTIPLE or weight.shape[1] % MULTIPLE or not weight.is_contiguous():
        return False
    return compiled() is not None


@one_launch
def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute x·weightᵀ + bias: x [rows, in], weight [out, in], bias [out] → [rows, out], with sums in float32."""
    out = torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype)
    x = x if x.stride(1) == 1 else x.contiguous()
    compiled().linear(x, weight, _or_empty(bias, out), out, FEW_ROWS, torch.get_num_threads())
    return out


def pack(weight: Tensor) -> Tensor:
    """Return a copy of ``weight`` [out, in], float32, for `packed_linear`: [panels, in, outputs of a panel]."""
    outputs = compiled().panel_outputs()
    panels = _arena.empty((-(-weight.shape[0] // outputs), weight.shape[1], outputs), weight.dtype)
    compiled().pack(weight.detach(), panels)
    return panels


@one_launch
def packed_linear(x: Tensor, panels: Tensor, out_size: int, bias: Tensor | None) -> Tensor:
    """Compute x·weightᵀ + bias in float32, with the result of `pack` for a weight of ``out_size`` rows."""
    out = torch.empty((x.shape[0], out_size), dtype=x.dtype)
    x = x if x.stride(1) == 1 else x.contiguous()
    compiled().packed_linear(x, panels, _or_empty(bias, out), out, torch.get_num_threads())
    return out


def _or_empty(bias: Tensor | None, like: Tensor) -> Tensor:
    """Return ``bias``, or an empty tensor of the same dtype as ``like`` if there is no bias."""
    return like.view(-1)[:0] if bias is None else bias
