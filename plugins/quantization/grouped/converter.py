"""The converter of ``quantize=int8`` and ``quantize=int4``: weights become integers while they are loaded, on a CPU."""

from __future__ import annotations

import torch
from torch import nn

from minisgl.config import ConfigError
from minisgl.layers.weight_shards import WeightShard, WeightSource
from minisgl.models.config import ModelConfig
from minisgl.plugins.kernels.ops.grouped import BLOCK, GroupedWeight, quantize
from minisgl.plugins.quantization.base import Quantization
from minisgl.plugins.quantization.grouped.layers import GroupedEmbedding, convert_layers

__all__ = ["GroupedConverter"]


class GroupedConverter(Quantization):
    """Gives linear layers, embedding and LM head integers of ``bits``, 4 or 8, for activations in ``dtype``."""

    def __init__(self, bits: int, device: torch.device, dtype: torch.dtype):
        if device.type != "cpu":
            raise ConfigError(f"quantize=int{bits} computes on a CPU, not on {device.type}: use quantize=fp8.")
        self.bits, self.dtype = bits, dtype

    def read(self, config: ModelConfig, quantize: bool) -> None:
        """Nothing is stored in this form."""

    def before_loading(self, model: nn.Module) -> None:
        """Convert the layers. Raises `ConfigError` if a matrix has no whole groups."""
        convert_layers(model, self.quantized, self.dtype, self.serves)
        for module in model.modules():
            if isinstance(module, GroupedEmbedding):
                module.keep_numbers()

    def serves(self, shard: WeightShard) -> bool:
        """Return true. Raises `ConfigError` if the columns of the slice are no whole groups."""
        columns = shard.target.shape[1]
        if columns % BLOCK:
            raise ConfigError(
                f"quantize=int{self.bits} has groups of {BLOCK} columns, but a rank has {columns} of {shard.name}: "
                "use a smaller tp, or leave quantize out."
            )
        return True

    def quantized(self, shard: WeightShard, source: WeightSource) -> GroupedWeight:
        """Read a slice in the dtype of activations, and quantise it."""
        target = shard.target
        if target.is_meta:
            target = torch.empty(target.shape, dtype=self.dtype)
        source.fill(WeightShard(shard.name, shard.shape, shard.index, target))
        return quantize(target, self.bits)
