"""``load_format=dummy``: random weights in place of those of a checkpoint, for benchmarks and tests."""

from __future__ import annotations

import hashlib
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch

from minisgl.config import Config
from minisgl.hooks import hookimpl
from minisgl.layers.weight_shards import WeightShard, WeightSource
from minisgl.models.converter import ModelConverter


@hookimpl(tryfirst=True)  # before the part that reads quantised weights from a checkpoint
def minisgl_convert_model(config: Config) -> ModelConverter | None:
    return RandomWeights(config.seed) if config.load_format == "dummy" else None


class RandomWeights(ModelConverter):
    """Loads a model with random weights, whatever its directory has."""

    def __init__(self, seed: int):
        self.seed = seed

    def open(self, path: str | Path) -> AbstractContextManager[WeightSource]:
        """Return the random weights."""
        return nullcontext(Dummy(self.seed))


class Dummy:
    """Random weights: normal with standard deviation ``std``; the weights of norms are ones.

    A tensor's values depend only on its name, its whole shape, the dtype, ``std``, the seed and the kind of device, not
    on the slice. So the ranks hold slices of the same model at any tensor-parallel size. Each tensor is drawn on the
    device that it belongs to.
    """

    names = None

    def __init__(self, seed: int = 0, std: float = 0.02):
        self.seed, self.std = seed, std

    def fill(self, shard: WeightShard) -> None:
        """Draw the whole tensor and copy the shard's slice into its target."""
        if shard.name.endswith("norm.weight"):
            shard.target.fill_(1.0)
            return
        digest = hashlib.sha256(f"{self.seed} {shard.name}".encode()).digest()
        generator = torch.Generator(shard.target.device)
        generator.manual_seed(int.from_bytes(digest[:7], "little"))
        dtype, device = shard.target.dtype, shard.target.device
        if dtype == torch.uint8:  # MXFP4: scales of 2⁻⁶, and any numbers
            first, end = (121, 122) if shard.name.endswith("_scales") else (0, 256)
            whole = torch.empty(shard.shape, dtype=dtype, device=device).random_(first, end, generator=generator)
            shard.target.copy_(whole[shard.index])
            return
        if shard.target.shape == shard.shape and shard.target.is_contiguous():
            shard.target.normal_(0.0, self.std, generator=generator)
            return
        whole = torch.empty(shard.shape, dtype=dtype, device=device).normal_(0.0, self.std, generator=generator)
        shard.target.copy_(whole[shard.index])
