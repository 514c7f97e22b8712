"""The matrix product of a linear layer on a CPU, in C++ (`linear.cpp`)."""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from minisgl.config import ConfigError
from minisgl.plugins.kernels.ops.cpp import CPU, load
from minisgl.plugins.kernels.ops.huge_pages import Arena
from minisgl.utils.launch import one_launch

MULTIPLE = 16
"""Both sizes of a weight must be multiples of this number."""

BFLOAT16, FLOAT32 = torch.bfloat16, torch.float32


@dataclass(frozen=True, slots=True)
class Rows:
    """Which kernel is fastest for how many rows, with the instructions of one kind of processor."""

    in_place: Mapping[torch.dtype, int]
    """Up to this number of rows the weights are read in place. With more rows they are rearranged, panel by panel."""
    served: Mapping[torch.dtype, int]
    """Up to this number of rows `linear` and `packed_linear` are faster than torch's product."""
    packed: int = 3
    """From this number of rows on, packed weights are faster than weights in place."""


ROWS: Mapping[str, Rows] = MappingProxyType(
    {
        # oneDNN multiplies with the processor's bfloat16 instructions, which the kernels do not use.
        "avx512_bf16": Rows(in_place={BFLOAT16: 16, FLOAT32: 12}, served={BFLOAT16: 12, FLOAT32: 128}),
        # Without these instructions oneDNN takes several times as long for bfloat16. For many rows in float32, BLAS
        # takes about the same time, and on some processors less.
        "avx512": Rows(in_place={BFLOAT16: 16, FLOAT32: 12}, served={BFLOAT16: sys.maxsize, FLOAT32: 128}),
        "avx": Rows(in_place={BFLOAT16: 12, FLOAT32: 8}, served={BFLOAT16: sys.maxsize, FLOAT32: 128}),
        "other": Rows(in_place={BFLOAT16: 12, FLOAT32: 12}, served={BFLOAT16: sys.maxsize, FLOAT32: 64}),
    }
)
"""`Rows` for the targets that `linear.cpp` distinguishes; measured in docs/benchmarks/cpu-offline.md, except "other",
which includes ARM."""

_arena = Arena(16 << 20)  # of packed weights


@functools.cache
def compiled() -> Any:
    """Compile and load the library. Return it, or None if it can't be compiled here."""
    try:
        return load(*CPU, native=True)
    except ConfigError:
        return None


@functools.cache
def rows() -> Rows:
    """Return the `Rows` for the instructions that the library was compiled for. The library must be `compiled`."""
    return ROWS[compiled().target()]


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
    compiled().linear(x, weight, _or_empty(bias, out), out, rows().in_place[x.dtype], torch.get_num_threads())
    return out


@one_launch
def ordered_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute `linear` in the order of sums of `packed_linear`, whatever the number of rows is."""
    out = torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype)
    x = x if x.stride(1) == 1 else x.contiguous()
    compiled().linear(x, weight, _or_empty(bias, out), out, 0, torch.get_num_threads())
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
