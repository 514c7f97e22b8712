"""Checkpoints with weights in FP8: a layer gets e4m3 and its scales, or the numbers that they stand for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from minisgl.config import ConfigError
from minisgl.layers.weight_shards import WeightShard, WeightSource
from minisgl.models.weights import WIDE, Checkpoint, dtype_name
from minisgl.plugins.kernels.ops.fp8 import E4M3, Fp8Weight, quantize_weight
from minisgl.plugins.quantization.e4m3.stored import SCALES, UNUSED, StoredFp8, dequantize_slice

__all__ = ["Fp8Checkpoint", "QuantizedShard"]


@dataclass(frozen=True, slots=True)
class QuantizedShard(WeightShard):
    """A slice that is read in ``dtype``, and quantised into ``target`` and ``scale_inv``: see `quantize_weight`.

    The slice is a matrix [out, in], or one of each expert [experts, out, in].
    """

    scale_inv: Tensor
    dtype: torch.dtype

    def load(self, source: WeightSource) -> None:
        """Read the slice from ``source``, and quantise it."""
        wide = torch.empty(self.target.shape, dtype=self.dtype, device=self.target.device)
        source.fill(WeightShard(self.name, self.shape, self.index, wide))
        if wide.dim() == 2:
            quantize_weight(wide, Fp8Weight(self.target, self.scale_inv))
            return
        for matrix, values, scale_inv in zip(wide, self.target, self.scale_inv, strict=True):
            quantize_weight(matrix, Fp8Weight(values, scale_inv))


class Fp8Checkpoint(Checkpoint):
    """A checkpoint with weights in FP8, in the layout ``fp8``.

    ``bytes_dequantized`` counts the bytes of the slices read so far that were e4m3 numbers and were converted to a
    wider dtype.
    """

    def __init__(self, path: str | Path, fp8: StoredFp8):
        super().__init__(path)
        self.fp8, self.bytes_dequantized = fp8, 0
        self._files = {name: file for name, file in self._files.items() if not name.endswith(UNUSED)}
        self.beside = {n: n + end for end in SCALES for n in self._files if n + end in self._files}

    def converted(self, shard: WeightShard, part: Tensor) -> Tensor:
        """Return ``part``, dequantised if the target is not in e4m3.

        Raises `ConfigError` if a copy to the target would change what the numbers mean.
        """
        dtype, scale = part.dtype, self.beside.get(shard.name)
        stored = f"{self.path}: the tensor {shard.name} is stored in {dtype_name(dtype)}"
        if dtype == E4M3 != shard.target.dtype:
            if scale is None:
                raise ConfigError(f"{stored} without scales: the checkpoint lacks {shard.name}{SCALES[0]}.")
            return self._dequantize(shard, part)
        if dtype != E4M3 and shard.target.dtype == E4M3:
            raise ConfigError(f"{stored}, but quantization_config of config.json implies float8_e4m3fn.")
        if dtype not in (E4M3, *WIDE):
            known = ", ".join(map(dtype_name, WIDE))
            raise ConfigError(f"{stored}, but weights must be in {known} or float8_e4m3fn.")
        if dtype != E4M3 and scale is not None:
            raise ConfigError(f"{stored}, but it has scales, {scale}, as if it were in float8_e4m3fn.")
        return part

    def _dequantize(self, shard: WeightShard, part: Tensor) -> Tensor:
        """Return the slice ``part`` of a tensor in e4m3 times its scales, in float32, on the target's device."""
        self.bytes_dequantized += part.nbytes
        device, name = shard.target.device, self.beside[shard.name]
        scale = self._files[name].get_tensor(name)
        self.bytes_read += scale.nbytes
        if not scale.is_floating_point():
            raise ConfigError(f"{self.path}: the scales {name} are stored in {dtype_name(scale.dtype)}, not as floats.")
        try:
            return dequantize_slice(part.to(device), scale.to(device), shard.shape, shard.index, self.fp8.block)
        except ValueError as error:
            raise ConfigError(f"{self.path}: {name} can't be read: {error}.") from None
