"""How ggml's types store numbers: bytes → float32, in plain torch. All others are compared with these functions.

A type cuts each row into blocks, of 32 numbers, or 256 for those with a K. A block has one scale ``d``, or a scale and
a minimum ``m``, and a small integer q for each number: the number is d·q or d·q + m. A block with a K has 8 or 16
sub-blocks whose scales are small integers too. Layouts: ggml-common.h and ggml-quants.c of ggml.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["dequantize", "q4_k_parts", "q6_k_parts"]


def dequantize(name: str, data: Tensor, columns: int) -> Tensor:
    """Return the numbers [rows, columns], float32, that the rows ``data`` [rows, bytes] of the type ``name`` store.

    ``data`` is uint8 and contiguous, and a row has whole blocks.
    """
    return _TYPES[name](data).view(len(data), columns)


def _half(data: Tensor, begin: int) -> Tensor:
    """Return the float16 number at byte ``begin`` of each block, [blocks, 1] float32."""
    return data[:, begin : begin + 2].contiguous().view(torch.float16).float()


def _nibbles(data: Tensor) -> Tensor:
    """Return the low halves of the bytes [..., n], then their high halves: [..., 2·n] float32."""
    return torch.cat((data & 15, data >> 4), dim=-1).float()


def _f32(data: Tensor) -> Tensor:
    return data.view(torch.float32)


def _f16(data: Tensor) -> Tensor:
    return data.view(torch.float16).float()


def _bf16(data: Tensor) -> Tensor:
    return data.view(torch.bfloat16).float()


def _q8_0(data: Tensor) -> Tensor:
    block = data.view(-1, 34)  # d, 32 signed bytes
    return _half(block, 0) * block[:, 2:].view(torch.int8).float()


def _q4_0(data: Tensor) -> Tensor:
    block = data.view(-1, 18)  # d, 32 times 4 bits
    return _half(block, 0) * (_nibbles(block[:, 2:]) - 8)


def _q4_1(data: Tensor) -> Tensor:
    block = data.view(-1, 20)  # d, m, 32 times 4 bits
    return _half(block, 0) * _nibbles(block[:, 4:]) + _half(block, 2)


def q4_k_parts(data: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return integers [blocks, 8, 32], uint8, scales [blocks, 8] and minimums [blocks, 8], which are subtracted."""
    block = data.view(-1, 144)  # d, d of the minima, 8 scales and 8 minima of 6 bits, 256 times 4 bits
    low, mins, high = block[:, 4:16].view(-1, 3, 4).unbind(1)
    scale = torch.cat((low & 63, (high & 15) | ((low >> 2) & 48)), dim=1).float()
    least = torch.cat((mins & 63, (high >> 4) | ((mins >> 2) & 48)), dim=1).float()
    pairs = block[:, 16:].reshape(-1, 4, 32)  # each 32 bytes: 32 numbers, and 32 more
    q = torch.cat((pairs & 15, pairs >> 4), dim=2).view(-1, 8, 32)
    return q, _half(block, 0) * scale, _half(block, 2) * least


def q6_k_parts(data: Tensor) -> tuple[Tensor, Tensor]:
    """Return integers [blocks, 16, 16], int8, and scales [blocks, 16]."""
    block = data.view(-1, 210)  # 256 times 4 bits, 256 times 2 bits, 16 signed scales, d
    low = block[:, :128].reshape(-1, 2, 64)
    high = block[:, 128:192].reshape(-1, 2, 1, 32)
    low = torch.cat((low & 15, low >> 4), dim=2).view(-1, 2, 4, 32)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=data.device).view(1, 1, 4, 1)
    q = (low | (((high >> shifts) & 3) << 4)).view(torch.int8) - 32
    return q.view(-1, 16, 16), _half(block, 208) * block[:, 192:208].view(torch.int8).float()


def _q4_k(data: Tensor) -> Tensor:
    q, scale, least = q4_k_parts(data)
    return scale.unsqueeze(2) * q.float() - least.unsqueeze(2)


def _q6_k(data: Tensor) -> Tensor:
    q, scale = q6_k_parts(data)
    return scale.unsqueeze(2) * q.float()


_TYPES: dict[str, Callable[[Tensor], Tensor]] = {
    "F32": _f32,
    "F16": _f16,
    "BF16": _bf16,
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q4_K": _q4_k,
    "Q6_K": _q6_k,
}
