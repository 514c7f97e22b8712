"""Sums along rows of logits in Triton, in one order whatever the number of rows: ``exact=true`` on a GPU.

torch chooses the order of such a sum by the number of rows, too. Here one program computes a row, `BLOCK` numbers at a
time from the left.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["cumsum", "log_sum_exp", "softmax"]

BLOCK = 4096


@triton.jit
def log_sum_exp_kernel(x, out, columns, stride_x, BLOCK: tl.constexpr):
    """Compute the logarithm of the sum of the exponentials of one row."""
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    x += row * stride_x
    tops = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, columns, BLOCK):
        tops = tl.maximum(tops, tl.load(x + start + i, mask=start + i < columns, other=float("-inf")))
    top = tl.max(tops, 0)
    base = tl.where(top == float("-inf"), 0.0, top)
    totals = tl.zeros([BLOCK], tl.float32)
    for start in range(0, columns, BLOCK):
        totals += tl.exp(tl.load(x + start + i, mask=start + i < columns, other=float("-inf")) - base)
    tl.store(out + row, tl.log(tl.sum(totals, 0)) + base)


@triton.jit
def cumulative_sum_kernel(x, out, columns, stride_x, BLOCK: tl.constexpr):
    """Compute the sums of the first 1, 2, 3, … numbers of one row."""
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    before = tl.zeros([1], tl.float32)
    for start in range(0, columns, BLOCK):
        value = tl.load(x + row * stride_x + start + i, mask=start + i < columns, other=0.0)
        tl.store(out + row * columns + start + i, before + tl.cumsum(value, 0), mask=start + i < columns)
        before += tl.sum(value, 0)


def log_sum_exp(logits: Tensor) -> Tensor:
    """Return the logarithm of the sum of the exponentials of each row: float32 [rows, vocab] → [rows, 1]."""
    out = torch.empty((len(logits), 1), dtype=torch.float32, device=logits.device)
    if len(logits):
        block = min(BLOCK, triton.next_power_of_2(logits.shape[1]))
        log_sum_exp_kernel[(len(logits),)](
            logits, out, logits.shape[1], logits.stride(0), BLOCK=block, num_warps=8, enable_fp_fusion=False
        )
    return out


def softmax(logits: Tensor, dim: int = 1) -> Tensor:
    """Return the softmax of each row: float32 [rows, columns] → the same shape. ``dim`` must be 1."""
    return (logits - log_sum_exp(logits)).exp()


def cumsum(x: Tensor, dim: int = 1) -> Tensor:
    """Return the sums of the first 1, 2, 3, … numbers of each row: float32 [rows, columns] → the same shape.

    ``dim`` must be 1.
    """
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    if len(x):
        block = min(1024, triton.next_power_of_2(x.shape[1]))
        cumulative_sum_kernel[(len(x),)](
            x, out, x.shape[1], x.stride(0), BLOCK=block, num_warps=4, enable_fp_fusion=False
        )
    return out
