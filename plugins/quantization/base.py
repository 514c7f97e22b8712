"""The base of the parts of the group ``quantization``: converters that read weights in another form, or make them.

`minisgl.plugins.models.quantized` builds the part that a checkpoint or the option ``quantize`` needs.
"""

from __future__ import annotations

from pathlib import Path

from minisgl.models.config import ModelConfig
from minisgl.models.converter import ModelConverter
from minisgl.models.weights import Checkpoint

__all__ = ["Quantization"]


class Quantization(ModelConverter):
    """What the group ``quantization`` builds: weights in another form than numbers of the model's dtype."""

    def read(self, config: ModelConfig, quantize: bool) -> None:
        """Read ``quantization_config`` of config.json, if it has one. Called first.

        ``quantize`` says that the option ``quantize`` asks for this form: then weights in another form are converted
        while they are loaded. Raises `ConfigError` for a form that can't be read.
        """
        raise NotImplementedError

    def open(self, path: str | Path) -> Checkpoint:
        """Open the checkpoint in the directory ``path``."""
        return Checkpoint(path)
