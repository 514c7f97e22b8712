"""The converter of ``quantization=gguf``: it opens the GGUF file that a view names."""

from __future__ import annotations

from pathlib import Path

from minisgl.config import ConfigError
from minisgl.models.config import ModelConfig
from minisgl.models.converter import Quantization
from minisgl.models.weights import Checkpoint
from minisgl.plugins.quantization.ggml.checkpoint import GgufCheckpoint

__all__ = ["GgufConverter"]


class GgufConverter(Quantization):
    """Loads the weights of a GGUF file."""

    def __init__(self) -> None:
        self.file = Path()

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
        return GgufCheckpoint(self.file)
