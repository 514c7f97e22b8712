"""Checkpoints with experts in MXFP4, which are kept if the MoE backend multiplies them, and else are dequantised.

A number has 4 bits: a sign, two bits of exponent and one of mantissa. 32 numbers of a row share a scale, a power of two
that is stored as its exponent plus 127. Source: OCP Microscaling Formats (MX) Specification 1.0, 2023.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from minisgl.config import ConfigError
from minisgl.models.weights import Checkpoint
from minisgl.plugins.quantization.base import Quantization

if TYPE_CHECKING:
    from torch import nn

    from minisgl.layers.weight_shards import WeightShard
    from minisgl.models.config import ModelConfig

BLOCK = 32
"""Numbers that share a scale."""
NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The number of each 4-bit code."""
BLOCKS, SCALES = "_blocks", "_scales"


class Mxfp4(Quantization):
    """Opens checkpoints in MXFP4. ``packed``: all experts are kept in MXFP4."""

    packed = False

    def read(self, config: ModelConfig, quantize: bool) -> None:
        """Check that weights are read in this form, and not converted to it: see `Quantization.read`."""
        if quantize:
            raise ConfigError("the option quantize does not convert weights to MXFP4: leave it out.")

    def before_loading(self, model: nn.Module) -> None:
        """Keep the weights of modules with the method ``keep_mxfp4`` as they are stored, if they can be multiplied."""
        keeping = [keep for module in model.modules() if (keep := getattr(module, "keep_mxfp4", None)) is not None]
        kept = [keep() for keep in keeping]
        self.packed = bool(kept) and all(kept)

    def open(self, path: str | Path) -> Checkpoint:
        """Open the checkpoint in the directory ``path``."""
        return Mxfp4Checkpoint(path, self.packed)


class Mxfp4Checkpoint(Checkpoint):
    """A checkpoint that has some tensors as blocks and scales: they have one name, and the shape of their numbers.

    ``NAME_blocks`` is [experts, out, in / 32, 16] uint8, ``NAME_scales`` [experts, out, in / 32] uint8, and NAME
    [experts, in, out], as transformers has it. The lower four bits of a byte are the first of its two numbers. With
    ``packed``, they are read as they are stored, under their own names.
    """

    def __init__(self, path: str | Path, packed: bool = False):
        super().__init__(path)
        self.packed = packed

    @property
    def names(self) -> frozenset[str]:
        """The names of all tensors, and NAME for each pair of blocks and scales."""
        stored = super().names
        if self.packed:
            return stored
        quantized = {name.removesuffix(BLOCKS) for name in stored if name.endswith(BLOCKS)}
        quantized = {name for name in quantized if f"{name}{SCALES}" in stored}
        return (stored - {f"{name}{end}" for name in quantized for end in (BLOCKS, SCALES)}) | quantized

    def converted(self, shard: WeightShard, part: Tensor) -> Tensor:
        """Return ``part``: blocks and scales are bytes."""
        return part if part.dtype == shard.target.dtype == torch.uint8 else super().converted(shard, part)

    def fill(self, shard: WeightShard) -> None:
        """Read the shard's slice into its target, one expert at a time if it is stored as blocks and scales."""
        if shard.name in self._files:
            super().fill(shard)
            return
        blocks, scales = (self._files[f"{shard.name}{end}"].get_slice(f"{shard.name}{end}") for end in (BLOCKS, SCALES))
        for stored, expected in ((blocks, (*self._blocks(shard), BLOCK // 2)), (scales, self._blocks(shard))):
            if tuple(stored.get_shape()) != expected or stored.get_dtype() != "U8":
                raise ConfigError(
                    f"{self.path}: the blocks or scales of the tensor {shard.name} have shape {stored.get_shape()} and "
                    f"dtype {stored.get_dtype()}, but config.json implies {list(expected)} and U8."
                )
        some, columns, rows = shard.index
        begin, end = columns.start // BLOCK, -(-columns.stop // BLOCK)  # the blocks that have these columns
        for i, expert in enumerate(range(some.start, some.stop)):
            packed, exponents = blocks[expert, rows, begin:end], scales[expert, rows, begin:end]
            self.bytes_read += packed.nbytes + exponents.nbytes
            numbers = dequantize(packed.to(shard.target.device), exponents.to(shard.target.device))
            first = columns.start - begin * BLOCK
            shard.target[i].copy_(numbers[:, first : first + columns.stop - columns.start].t())

    def _blocks(self, shard: WeightShard) -> tuple[int, int, int]:
        experts, size_in, size_out = shard.shape
        return experts, size_out, -(-size_in // BLOCK)


def dequantize(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return numbers [rows, columns] in float32 of blocks [rows, columns / 32, 16] and scales [rows, columns / 32]."""
    table = torch.tensor(NUMBERS, device=blocks.device)
    pairs = torch.stack((table[(blocks & 15).int()], table[(blocks >> 4).int()]), dim=-1)  # [rows, blocks, 16, 2]
    return torch.ldexp(pairs.flatten(2), scales.int().unsqueeze(-1) - 127).flatten(1)
