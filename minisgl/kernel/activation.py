"""Gated activations over a merged projection: the plain torch versions.

Shazeer, GLU Variants Improve Transformer, 2020.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def silu_and_mul(x: Tensor) -> Tensor:
    """x [..., 2·dim], gate before up → silu(gate)·up [..., dim]."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def gelu_and_mul(x: Tensor, approximate: str = "none") -> Tensor:
    """x [..., 2·dim], gate before up → gelu(gate)·up [..., dim]; ``approximate`` as in torch: "none" or "tanh"."""
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate, approximate=approximate).mul_(up)
