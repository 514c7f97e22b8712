"""Quantised matrices of linear layers: which blocks of a checkpoint's scales a rank loads, and the product.

A layer that fuses several matrices, or holds a slice of one, has the same blocks of 128 × 128 as the checkpoint only if
every part begins at a block and, except for the last part, ends at one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from minisgl.config import ConfigError
from minisgl.layers.weight_shards import WeightShard
from minisgl.plugins.kernels.ops.activation import Act
from minisgl.plugins.kernels.ops.fp8 import BLOCK, E4M3, Fp8Weight, QuantizedRows, blocks
from minisgl.plugins.kernels.ops.fp8_gemm import Fp8Gemm, GatedFp8Gemm
from minisgl.plugins.quantization.e4m3.checkpoint import QuantizedShard

__all__ = ["Fp8", "Fp8Matrix", "fp8_shards"]


@dataclass(frozen=True)
class Fp8:
    """How the linear layers of a model are quantised.

    ``gemm`` multiplies. ``stored`` says that the checkpoint has weights in FP8. ``quantize`` says that other weights
    are quantised while they are loaded; without it, a layer that has such a weight is not in FP8.
    """

    gemm: Fp8Gemm
    stored: bool
    quantize: bool

    def serves(self, weights: Sequence[str], names: frozenset[str] | None) -> bool:
        """Return whether a layer with these ``weights`` is in FP8. ``names`` are the tensors that the source has."""
        return self.quantize or names is None or all(f"{name}_scale_inv" in names for name in weights)


class Fp8Matrix(nn.Module):
    """This rank's part of one or several matrices with the same input, in e4m3, one after another.

    ``rows`` are the numbers of rows of the parts. Parts are one fused matrix if all of them have whole blocks of rows.
    Else every part has blocks of its own, and is a product of its own. ``dtype`` is that of activations and of weights
    before they are quantised. Raises `ConfigError` if the product can't serve a part's shape.
    """

    def __init__(self, rows: Sequence[int], in_size: int, fp8: Fp8, dtype: torch.dtype, device: torch.device):
        super().__init__()
        self.fp8, self.dtype = fp8, dtype
        self.rows = [sum(rows)] if all(n % BLOCK == 0 for n in rows) else [n for n in rows if n]
        scales = (sum(map(blocks, self.rows)), blocks(in_size))
        self.values = nn.Parameter(torch.empty((sum(rows), in_size), dtype=E4M3, device=device), requires_grad=False)
        self.scale_inv = nn.Parameter(torch.empty(scales, device=device), requires_grad=False)
        self.loaded: list[Any] = []
        for weight in self._fused():
            if reason := fp8.gemm.refuse(weight, dtype):
                raise ConfigError(f"a matrix of {len(weight.values)} × {in_size} can't be computed in FP8: {reason}")

    def _fused(self) -> Iterator[Fp8Weight]:
        """Yield the matrices that are multiplied at once."""
        row = block = 0
        for rows in self.rows:
            yield Fp8Weight(self.values[row : row + rows], self.scale_inv[block : block + blocks(rows)])
            row, block = row + rows, block + blocks(rows)

    def part(self, begin: int, rows: int) -> Fp8Weight:
        """Return the part of ``rows`` rows that begins at row ``begin``."""
        row = block = 0
        for fused in self.rows:
            if begin < row + fused:
                block += (begin - row) // BLOCK
                break
            row, block = row + fused, block + blocks(fused)
        return Fp8Weight(self.values[begin : begin + rows], self.scale_inv[block : block + blocks(rows)])

    def shards(
        self,
        name: str,
        shape: tuple[int, int],
        dim: int,
        start: int,
        target: Fp8Weight,
        names: frozenset[str] | None,
    ) -> Iterator[WeightShard]:
        """Yield the shards of a checkpoint's tensor ``name``: see `fp8_shards`. ``target`` is a result of `part`."""
        return fp8_shards(self.fp8, self.dtype, name, shape, dim, start, target, names)

    def after_load(self) -> None:
        """Prepare the loaded weights for the product."""
        self.loaded = [self.fp8.gemm.load(weight, self.dtype) for weight in self._fused()]

    def takes_quantized(self, rows: int) -> bool:
        """Return whether the products of ``rows`` rows take `QuantizedRows`: see `Fp8Gemm.takes_quantized`."""
        return all(self.fp8.gemm.takes_quantized(weight, rows) for weight in self.loaded)

    def forward(self, x: Tensor | QuantizedRows, bias: Tensor | None) -> Tensor:
        """Multiply x [tokens, in] with all parts, and add the bias; returns [tokens, sum of rows]."""
        done = [self.fp8.gemm.forward(weight, x) for weight in self.loaded]
        out = done[0] if len(done) == 1 else torch.cat(done, dim=1)
        return out if bias is None else out.add_(bias)

    def forward_gated(self, x: Tensor | QuantizedRows, act: Act) -> Tensor | None:
        """Return act(gate)·up [tokens, rows / 2] for a matrix of gate and up, or None: see `GatedFp8Gemm`."""
        if len(self.loaded) > 1 or not isinstance(self.fp8.gemm, GatedFp8Gemm):
            return None
        return self.fp8.gemm.forward_gated(self.loaded[0], x, act)


def fp8_shards(
    fp8: Fp8,
    dtype: torch.dtype,
    name: str,
    shape: tuple[int, ...],
    dim: int,
    start: int,
    target: Fp8Weight,
    names: frozenset[str] | None,
) -> Iterator[WeightShard]:
    """Yield the shards of a checkpoint's tensor ``name`` of ``shape``, cut along ``dim`` at ``start``, for ``target``.

    The tensor is a matrix [out, in], or one of each expert [experts, out, in], which is not cut along the experts. A
    weight in FP8 has a tensor of scales beside it; raises `ConfigError` if the cut goes through a block. Other weights
    are quantised. ``names`` are the tensors that the source has; None: it has any tensor, in any dtype.
    """
    if not fp8.stored or names is None or f"{name}_scale_inv" not in names:
        wide = WeightShard.part(name, shape, dim, start, target.values)
        yield QuantizedShard(wide.name, wide.shape, wide.index, wide.target, target.scale_inv, dtype)
        return
    here, total = target.values.shape[dim], shape[dim]
    if start % BLOCK or (start + here < total and here % BLOCK):
        lines = ("rows", "columns")[dim - len(shape)]
        raise ConfigError(
            f"The slice {start} to {start + here} of the {total} {lines} of {name} cuts through "
            f"blocks of {BLOCK}, which have one scale each: use a smaller tp, or a checkpoint that is not in FP8 "
            "with quantize=fp8."
        )
    yield WeightShard.part(name, shape, dim, start, target.values)
    scales = (*shape[:-2], *map(blocks, shape[-2:]))
    yield WeightShard.part(f"{name}_scale_inv", scales, dim, start // BLOCK, target.scale_inv)
