"""The matrix product of a linear layer for few rows on a CPU, in C++ (`linear.cpp`)."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from minisgl.config import ConfigError
from minisgl.kernel.cpp import load
from minisgl.kernel.launch import one_launch

MULTIPLE = 16
"""Both sizes of a weight must be multiples of this number."""


@functools.cache
def compiled() -> Any:
    """Compile and load the library. Return its function, or None if it can't be compiled here."""
    try:
        return load("linear.cpp", native=True).few_rows_linear
    except ConfigError:
        return None


def serves(weight: Tensor) -> bool:
    """Return whether `few_rows_linear` can multiply with ``weight`` on this machine. The first call may compile."""
    if weight.device.type != "cpu" or weight.dtype not in (torch.bfloat16, torch.float32):
        return False
    if weight.shape[0] % MULTIPLE or weight.shape[1] % MULTIPLE or not weight.is_contiguous():
        return False
    return compiled() is not None


@one_launch
def few_rows_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute x·weightᵀ + bias: x [rows, in], weight [out, in], bias [out] → [rows, out], with sums in float32."""
    out = torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype)
    x = x if x.stride(1) == 1 else x.contiguous()
    compiled()(x, weight, out.view(-1)[:0] if bias is None else bias, out, torch.get_num_threads())
    return out
