"""Gated activations over a merged projection: plain torch, and Triton on a GPU.

Shazeer, GLU Variants Improve Transformer, 2020.
"""

from __future__ import annotations

from typing import Literal

import torch.nn.functional as F
from torch import Tensor

Act = Literal["silu", "gelu", "gelu_tanh"]

ACTS: dict[str, Act] = {"silu": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}
"""Hugging Face's ``hidden_act`` → its name in kernels that have it inside them."""


def act_and_mul(x: Tensor, act: Act) -> Tensor:
    """x [..., 2·dim], gate before up → act(gate)·up [..., dim]."""
    return silu_and_mul(x) if act == "silu" else gelu_and_mul(x, "tanh" if act == "gelu_tanh" else "none")


def silu_and_mul(x: Tensor) -> Tensor:
    """x [..., 2·dim], gate before up → silu(gate)·up [..., dim]."""
    if x.is_cuda:
        from minisgl.kernel.triton import activation as triton

        return triton.silu_and_mul(x)
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def gelu_and_mul(x: Tensor, approximate: str = "none") -> Tensor:
    """x [..., 2·dim], gate before up → gelu(gate)·up [..., dim]; ``approximate`` as in torch: "none" or "tanh"."""
    if x.is_cuda:
        from minisgl.kernel.triton import activation as triton

        return triton.gelu_and_mul(x, approximate)
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate, approximate=approximate).mul_(up)
