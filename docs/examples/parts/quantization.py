"""`quantization=halves`: checkpoints whose `quantization_config` says `halves` store every weight divided by two."""

from dataclasses import dataclass
from typing import ClassVar

from minisgl import hookimpl
from minisgl.models.weights import Checkpoint
from minisgl.plugins.quantization.base import Quantization


@dataclass
class Halves:
    """Weights that are stored divided by two."""

    methods: ClassVar[tuple[str, ...]] = ("halves",)

    def build(self):
        return HalvesConverter()


class HalvesConverter(Quantization):
    def read(self, config, quantize):
        """Every checkpoint of this kind has the same form."""

    def open(self, path):
        return HalvesCheckpoint(path)


class HalvesCheckpoint(Checkpoint):
    def converted(self, shard, part):
        return super().converted(shard, part) * 2


@hookimpl
def minisgl_configs():
    yield "quantization", "halves", Halves
