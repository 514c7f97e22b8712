"""The product with integers of 4 or 8 bits on a CPU, in C++ (`grouped.cpp`)."""

from __future__ import annotations

import torch
from torch import Tensor

from minisgl.plugins.kernels.ops.cpp.linear import compiled
from minisgl.utils.launch import one_launch

__all__ = ["grouped_linear", "serves"]


def serves(x: Tensor) -> bool:
    """Return whether `grouped_linear` can multiply x on this machine. The first call may compile."""
    if x.device.type != "cpu" or x.dtype not in (torch.bfloat16, torch.float32):
        return False
    return compiled() is not None


@one_launch
def grouped_linear(x: Tensor, panels: Tensor, form: tuple[int, int, bool], outputs: int, bias: Tensor | None) -> Tensor:
    """Compute `minisgl.plugins.kernels.ops.grouped.grouped_linear`: see `GroupedWeight` for ``panels`` and ``form``."""
    out = torch.empty((x.shape[0], outputs), dtype=x.dtype)
    x = x if x.stride(1) == 1 else x.contiguous()
    bias = out.view(-1)[:0] if bias is None else bias
    compiled().grouped_linear(x, panels, bias, out, *form, torch.get_num_threads())
    return out
