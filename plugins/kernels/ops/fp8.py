"""FP8 matrices with one scale per block (the layout of Qwen3-FP8 and DeepSeek-V3), and their product in plain torch.

A weight [out, in] is stored in e4m3 with one float32 scale for each block of 128 × 128; blocks at the lower and right
edges may be smaller. The number that an element stands for is its e4m3 value times the scale of its block. Activations
are quantised when they are multiplied, with one scale for each row and each 128 columns. DeepSeek-AI, DeepSeek-V3
Technical Report, 2024, section 3.3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl.utils.launch import one_launch

__all__ = [
    "BLOCK",
    "E4M3",
    "Fp8Weight",
    "QuantizedRows",
    "blocks",
    "dequantize",
    "fp8_linear_torch",
    "quantize_rows",
    "quantize_weight",
]

BLOCK = 128
"""Rows and columns of a weight's block, and columns of an activation's group."""

E4M3 = torch.float8_e4m3fn
LARGEST = torch.finfo(E4M3).max  # 448


class Fp8Weight(NamedTuple):
    """A quantised matrix: ``values`` [out, in] in e4m3, and ``scale_inv`` [blocks of rows, blocks of columns], float32.

    ``scale_inv`` is what checkpoints call ``weight_scale_inv``: the factor that leads from e4m3 back to the weight.
    """

    values: Tensor
    scale_inv: Tensor


@dataclass(frozen=True)
class QuantizedRows:
    """Quantised activations: ``values`` [rows, in] in e4m3, and ``factors`` [rows, groups of 128 columns], float32.

    ``factors`` lead from e4m3 back to the activations. They are stored column by column, and each column begins at a
    multiple of 16 bytes, as TMA requires. ``dtype`` is that of the activations, and of their products.
    """

    values: Tensor
    factors: Tensor
    dtype: torch.dtype

    @classmethod
    def empty(cls, x: Tensor, cols: int) -> QuantizedRows:
        """Return uninitialised rows of ``cols`` columns, as many as x [rows, any] has, with x's dtype and device."""
        rows = len(x)
        values = torch.empty((rows, cols), dtype=E4M3, device=x.device)
        factors = torch.empty((blocks(cols), -(-rows // 4) * 4), device=x.device)
        return cls(values, factors.T[:rows], x.dtype)

    def __len__(self) -> int:
        return len(self.values)


def blocks(size: int) -> int:
    """Return the number of blocks of 128 that cover ``size`` rows or columns."""
    return -(-size // BLOCK)


def quantize_weight(weight: Tensor, into: Fp8Weight) -> None:
    """Quantise weight [out, in], of any floating dtype, in blocks of 128 × 128 into ``into``.

    The largest magnitude of a block becomes 448, the largest number of e4m3. A block of zeros has the scale 1.
    """
    rows, cols = weight.shape
    padding = (0, blocks(cols) * BLOCK - cols, 0, blocks(rows) * BLOCK - rows)
    tiles = F.pad(weight.float(), padding).unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    scale = _scale(tiles.abs().amax(dim=(1, 3)))
    values = (tiles * scale[:, None, :, None]).clamp_(-LARGEST, LARGEST)
    into.values.copy_(values.flatten(0, 1).flatten(1, 2)[:rows, :cols])
    into.scale_inv.copy_(_inverse(scale))


def quantize_rows(x: Tensor) -> QuantizedRows:
    """Quantise x [rows, in] in groups of 128 columns of a row."""
    cols = x.shape[1]
    groups = F.pad(x.float(), (0, blocks(cols) * BLOCK - cols)).unflatten(1, (-1, BLOCK))
    scale = _scale(groups.abs().amax(dim=2))
    values = (groups * scale[:, :, None]).clamp_(-LARGEST, LARGEST)
    rows = QuantizedRows.empty(x, cols)
    rows.values.copy_(values.flatten(1)[:, :cols])
    rows.factors.copy_(_inverse(scale))
    return rows


def _scale(largest: Tensor) -> Tensor:
    """Return the factors to e4m3 for blocks whose largest magnitudes are ``largest``; 1 for blocks of zeros."""
    return torch.full_like(largest, LARGEST) / torch.where(largest > 0, largest, LARGEST)


def _inverse(scale: Tensor) -> Tensor:
    """Return 1 / scale, rounded once; torch computes ``number / tensor`` as a product with a rounded reciprocal."""
    return torch.ones_like(scale) / scale


def dequantize(weight: Fp8Weight) -> Tensor:
    """Return the matrix [out, in] in float32."""
    return _spread(weight.values.float(), weight.scale_inv.repeat_interleave(BLOCK, 0)[: len(weight.values)])


def _spread(values: Tensor, factors: Tensor) -> Tensor:
    """Multiply values [rows, columns] with factors [rows, groups of 128 columns]; overwrites and returns ``values``."""
    return values.mul_(factors.repeat_interleave(BLOCK, 1)[:, : values.shape[1]])


@one_launch
def fp8_linear_torch(x: Tensor | QuantizedRows, weight: Fp8Weight) -> Tensor:
    """Return x·weightᵀ [rows, out] in x's dtype for x [rows, in]: the torch reference of all FP8 products.

    x is quantised (`quantize_rows`) if it is not yet; products and sums are in float32.
    """
    rows = x if isinstance(x, QuantizedRows) else quantize_rows(x)
    return F.linear(_spread(rows.values.float(), rows.factors), dequantize(weight)).to(rows.dtype)
