"""RMSNorm and the gated SiLU on a CPU, in C++ (`elementwise.cpp`): one pass each, not several torch operations."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from minisgl.config import ConfigError
from minisgl.plugins.kernels.ops.cpp import CPU, load
from minisgl.utils.launch import one_launch

MULTIPLE = 16
"""The last dimension of each tensor must be a multiple of this number."""


@functools.cache
def compiled() -> Any:
    """Compile and load the library. Return it, or None if it can't be compiled here."""
    try:
        return load(*CPU, native=True)
    except ConfigError:
        return None


def serves(x: Tensor, size: int) -> bool:
    """Return whether the functions can compute x [rows, …], whose result has ``size`` columns, on this machine.

    The first call may compile.
    """
    if x.device.type != "cpu" or x.dtype not in (torch.float32, torch.bfloat16):
        return False
    return x.dim() == 2 and size % MULTIPLE == 0 and x.is_contiguous() and compiled() is not None


@one_launch
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute `minisgl.plugins.kernels.ops.norm.rms_norm`."""
    out = torch.empty_like(x)
    compiled().add_rms_norm(x, x[:0], weight, out, eps, torch.get_num_threads())
    return out


@one_launch
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Compute `minisgl.plugins.kernels.ops.norm.add_rms_norm`; the sum is written over x."""
    out = torch.empty_like(x)
    compiled().add_rms_norm(x, residual, weight, out, eps, torch.get_num_threads())
    return out, x


@one_launch
def silu_and_mul(x: Tensor) -> Tensor:
    """Compute `minisgl.plugins.kernels.ops.activation.silu_and_mul`."""
    out = torch.empty((x.shape[0], x.shape[1] // 2), dtype=x.dtype)
    compiled().silu_and_mul(x, out, torch.get_num_threads())
    return out
