"""Gated activations over a merged gate-and-up projection: Triton on a GPU, plain torch on a CPU.

With a compiler, a CPU computes SiLU in C++.

Shazeer, GLU Variants Improve Transformer, 2020.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch.nn.functional as F
from torch import Tensor

from minisgl.layers.linear import activation as check
from minisgl.plugins.kernels.ops.cpp import elementwise as cpp
from minisgl.plugins.kernels.ops.fp8 import QuantizedRows, quantize_rows

Act = Literal["silu", "gelu", "gelu_tanh"]

ACTS: dict[str, Act] = {"silu": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}
"""Hugging Face's ``hidden_act`` → the activation's name in the kernels that compute it."""


def activation(name: str) -> Callable[[Tensor], Tensor]:
    """Return the gated activation for Hugging Face's ``hidden_act``: [..., 2·dim] → [..., dim]. See `check`."""
    check(name)
    return partial(act_and_mul, act=ACTS[name])


def act_and_mul(x: Tensor, act: Act) -> Tensor:
    """Return act(gate)·up [..., dim] for x [..., 2·dim]; the gate half comes first."""
    return silu_and_mul(x) if act == "silu" else gelu_and_mul(x, "tanh" if act == "gelu_tanh" else "none")


def act_and_mul_quantized(x: Tensor, act: Act) -> QuantizedRows:
    """Return quantize_rows(act(gate)·up) [rows, dim] for x [rows, 2·dim]; the gate half comes first."""
    if x.is_cuda:
        from minisgl.plugins.kernels.ops.triton import activation as triton

        return triton.act_and_mul_quantized(x, act)
    return quantize_rows(act_and_mul(x, act))


def silu_and_mul(x: Tensor) -> Tensor:
    """Return silu(gate)·up [..., dim] for x [..., 2·dim]; the gate half comes first."""
    if x.is_cuda:
        from minisgl.plugins.kernels.ops.triton import activation as triton

        return triton.silu_and_mul(x)
    if cpp.serves(x, x.shape[-1] // 2):
        return cpp.silu_and_mul(x)
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def gelu_and_mul(x: Tensor, approximate: str = "none") -> Tensor:
    """Return gelu(gate)·up [..., dim] for x [..., 2·dim]; the gate half comes first.

    ``approximate`` is torch's: "none" or "tanh".
    """
    if x.is_cuda:
        from minisgl.plugins.kernels.ops.triton import activation as triton

        return triton.gelu_and_mul(x, approximate)
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate, approximate=approximate).mul_(up)
