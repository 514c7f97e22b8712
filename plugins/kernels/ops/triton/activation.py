"""Gated activations in Triton: gate and up are read once, and their product is written once, also quantised to e4m3.

`minisgl.plugins.kernels.ops.activation` has the torch references and describes arguments and results.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl.plugins.kernels.ops.fp8 import QuantizedRows
from minisgl.plugins.kernels.ops.triton.device import device_function
from minisgl.plugins.kernels.ops.triton.early import start_next, starts_early, wait_for_previous
from minisgl.plugins.kernels.ops.triton.quantize import GROUP, store_quantized

BLOCK = 1024


@device_function
def gate(x, ACT: tl.constexpr):
    """Return silu(x), gelu(x) or gelu_tanh(x), as ACT says, for float32 x."""
    if ACT == "silu":
        return x / (1.0 + tl.exp(-x))
    if ACT == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    # 0.5·x·(1 + tanh(y)) is x·sigmoid(2·y)
    y = 0.7978845608028654 * (x + 0.044715 * x * x * x)
    return x / (1.0 + tl.exp(-2.0 * y))


@device_function
def gated(gates, ups, ACT: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """Return act(gate)·up for float32 tensors, as `gate` does.

    The ACT "clamped" is that of gpt-oss: gate·sigmoid(ALPHA·gate)·(up + 1), with both clamped to LIMIT.
    """
    if ACT == "clamped":
        gates, ups = tl.minimum(gates, LIMIT), tl.minimum(tl.maximum(ups, -LIMIT), LIMIT)
        return gates / (1.0 + tl.exp(-ALPHA * gates)) * (ups + 1.0)
    return gate(gates, ACT) * ups


@triton.jit
def act_and_mul_kernel(
    x, out, factors, stride_x, stride_factors,
    DIM: tl.constexpr, ACT: tl.constexpr, QUANTIZE: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    """Write act(gate)·up for BLOCK columns of one row of x. One program: one row, one block of columns.

    With QUANTIZE the result is rounded to x's dtype, and then quantised; BLOCK is then a multiple of 128.
    """
    if EARLY:
        start_next()
        wait_for_previous()
    row, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = i < DIM
    gated = gate(tl.load(x + row * stride_x + i, mask=real, other=0.0).to(tl.float32), ACT)
    up = tl.load(x + row * stride_x + DIM + i, mask=real, other=0.0).to(tl.float32)
    product = (gated * up).to(x.dtype.element_ty)
    if QUANTIZE:
        groups = tl.reshape(product.to(tl.float32), [BLOCK // GROUP, GROUP])
        first = tl.program_id(1) * (BLOCK // GROUP)
        store_quantized(groups, out, factors, row, first, DIM, stride_factors, BLOCK // GROUP)
    else:
        tl.store(out + row * DIM + i, product, mask=real)


def silu_and_mul(x: Tensor) -> Tensor:
    """Compute `minisgl.plugins.kernels.ops.activation.silu_and_mul` on a GPU."""
    return _launch(x, "silu")


def gelu_and_mul(x: Tensor, approximate: str = "none") -> Tensor:
    """Compute `minisgl.plugins.kernels.ops.activation.gelu_and_mul` on a GPU."""
    return _launch(x, "gelu_tanh" if approximate == "tanh" else "gelu")


def act_and_mul_quantized(x: Tensor, act: str) -> QuantizedRows:
    """Compute `minisgl.plugins.kernels.ops.activation.act_and_mul_quantized` on a GPU."""
    out = QuantizedRows.empty(x, x.shape[1] // 2)
    _into(x, act, out.values, out.factors)
    return out


def _launch(x: Tensor, act: str) -> Tensor:
    dim = x.shape[-1] // 2
    out = torch.empty((*x.shape[:-1], dim), dtype=x.dtype, device=x.device)
    _into(x if x.dim() == 2 else x.view(-1, 2 * dim), act, out, None)
    return out


def _into(rows: Tensor, act: str, out: Tensor, factors: Tensor | None) -> None:
    dim = rows.shape[1] // 2
    block = min(BLOCK, triton.next_power_of_2(dim))
    if factors is not None:
        block = max(block, GROUP.value)
    act_and_mul_kernel[(rows.shape[0], triton.cdiv(dim, block))](
        rows, out, factors, rows.stride(0), 0 if factors is None else factors.stride(1),
        DIM=dim, ACT=act, QUANTIZE=factors is not None, BLOCK=block, num_warps=4, **starts_early(rows),
    )  # fmt: skip
