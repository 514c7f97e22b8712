"""The converter of ``quantization=gguf``: it opens the GGUF file that a view names, and lets weights stay quantised."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from minisgl.config import ConfigError
from minisgl.layers.weight_shards import WeightShard, WeightSource
from minisgl.models.config import ModelConfig
from minisgl.models.weights import Checkpoint
from minisgl.plugins.kernels.ops.cpp import grouped as cpp
from minisgl.plugins.kernels.ops.grouped import GroupedWeight
from minisgl.plugins.quantization.base import Quantization
from minisgl.plugins.quantization.ggml.checkpoint import GgufCheckpoint
from minisgl.plugins.quantization.grouped.layers import convert_layers

__all__ = ["WEIGHTS", "GgufConverter"]

WEIGHTS = ("auto", "quantized", "dequantized")
"""The values of the option ``quantization.weights``."""


class GgufConverter(Quantization):
    """Loads the weights of a GGUF file. ``weights`` is one of `WEIGHTS`: see `minisgl.plugins.quantization.gguf`."""

    def __init__(self, weights: str, device: torch.device, dtype: torch.dtype):
        if weights not in WEIGHTS:
            raise ConfigError(f"quantization.weights={weights} is unknown: use {', '.join(WEIGHTS)}.")
        if weights == "quantized" and device.type != "cpu":
            raise ConfigError(f"weights stay quantised on a CPU, not on {device.type}: leave quantization.weights out.")
        self.keep = weights == "quantized" or (
            weights == "auto" and cpp.serves(torch.empty(0, dtype=dtype, device=device))
        )
        self.dtype, self.file = dtype, Path()
        self._checkpoint: GgufCheckpoint | None = None  # None: the weights are dummies

    def read(self, config: ModelConfig, quantize: bool) -> None:
        """Read the name of the file: see `minisgl.plugins.quantization.ggml.view`."""
        if quantize:
            raise ConfigError("the option quantize can't be used with a GGUF file: leave it out.")
        stored = config.raw.get("quantization_config") or {}
        if stored.get("quant_method") != "gguf" or not isinstance(stored.get("file"), str):
            raise ConfigError("quantization=gguf is for GGUF files: use model=FILE.gguf.")
        self.file = Path(stored["file"])

    def open(self, path: str | Path) -> Checkpoint:
        """Open the GGUF file."""
        self._checkpoint = GgufCheckpoint(self.file)
        return self._checkpoint

    def before_loading(self, model: nn.Module) -> None:
        """Let the layers keep integers whose matrices are stored as integers, unless they are to be dequantised."""
        if self.keep and self._checkpoint is not None:
            convert_layers(model, _read, self.dtype, self._checkpoint.serves_grouped)


def _read(shard: WeightShard, source: WeightSource) -> GroupedWeight:
    assert isinstance(source, GgufCheckpoint)
    return source.grouped(shard)
