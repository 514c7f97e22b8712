"""Lab int8: A quarter of the bytes.

Grade it:  python -m minisgl.lab test int8     (`hint int8` for a hint)
Serve it:  python -m minisgl quantize=int8 plugins=my_int8.py quantization=mine
"""

# minisgl lab int8, skeleton c8a7348a54 (minisgl 0.2.0)

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from minisgl.config import ConfigError
from minisgl.hooks import hookimpl
from minisgl.layers.linear import LinearColParallelMerged, LinearQKVMerged, LinearRowParallel
from minisgl.models.config import ModelConfig
from minisgl.models.converter import convert
from minisgl.plugins.quantization.base import Quantization

BLOCK = 32
"""Columns with a common scale."""


@dataclass
class Mine:
    """Linear layers in integers of 8 bits with a scale for each 32 columns, in plain torch: short, and slow."""

    methods: ClassVar[tuple[str, ...]] = ()

    def build(self, device: torch.device, dtype: torch.dtype, build_part: Callable[[str], Any]) -> Quantization:
        return MyConverter(device)


@dataclass(frozen=True, slots=True)
class Packed:
    """A matrix [outputs, columns]: the number in column 32 b + i of row o is ``integers[o, b, i] * scales[o, b]``."""

    integers: Tensor  # int8 [outputs, blocks, 32]
    scales: Tensor  # float16 [outputs, blocks]


def pack(weight: Tensor) -> Packed:
    """Return a weight [outputs, columns], of any floating-point dtype, in integers. It does not change the weight."""
    # TODO int8.pack
    # 1. No number is off by more than half a step of its block, and a little for the rounding of the scale to float16.
    # 2. The steps are as small as the numbers of the block allow: one block's large number costs no other block.
    # 3. A block may be all zeros, or have numbers for which a scale in float16 is too small.
    raise NotImplementedError


def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return activations x [rows, columns] as integers: int8 [rows, blocks, 32], and scales float32 [rows, blocks]."""
    # TODO int8.round
    # 1. As for weights, but the scale is not rounded: it is used at once, and not kept.
    # 2. A row may be anything, zeros too, and does not depend on the other rows: the answer to one client does not
    #    change with the requests of others.
    raise NotImplementedError


def product(x: Tensor, packed: Packed, bias: Tensor | None = None) -> Tensor:
    """Return x [rows, columns] times the transposed weight, plus the bias [outputs], in the dtype of x."""
    # TODO int8.product
    # 1. The product of two blocks is a sum of 32 products of integers, and exact. Only then come the scales: both.
    # 2. The sum over the blocks, and the bias, are in float32.
    # 3. The weight was made small so that little is read. Never make all of its numbers large again: for few rows, no
    #    tensor of the product is larger than the packed integers, if these have several blocks.
    # 4. A row's result does not depend on the other rows.
    raise NotImplementedError


class BlocksLayer(nn.Module):
    """A linear layer whose weight becomes `Packed` when it has been loaded."""

    weight: nn.Parameter
    packed: Packed

    def keep_packed(self) -> None:
        """Pack the weight, and free it."""
        self.packed = pack(self.weight.detach())
        del self.weight

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply x [..., columns] with the packed weight."""
        return product(x.reshape(-1, x.shape[-1]), self.packed, bias).view(*x.shape[:-1], -1)


class BlocksMerged(BlocksLayer):
    """A merged column-parallel layer."""

    bias: nn.Parameter | None

    def forward(self, x: Tensor) -> Tensor:
        """Multiply x with all parts: see `minisgl.layers.linear.Merged`."""
        return self.multiply(x, self.bias)


class BlocksColParallel(BlocksMerged, LinearColParallelMerged):
    """`LinearColParallelMerged` of integers."""


class BlocksQKV(BlocksMerged, LinearQKVMerged):
    """`LinearQKVMerged` of integers."""


class BlocksRowParallel(BlocksLayer, LinearRowParallel):
    """`LinearRowParallel` of integers."""

    def forward(self, x: Tensor) -> Tensor:
        """Multiply x [..., in / size]: see `LinearRowParallel`."""
        y = self.multiply(x, self.bias if self.comm.rank == 0 else None)
        return self.comm.all_reduce(y) if self.reduce else y


class MyConverter(Quantization):
    """Packs the linear layers. The weights are in memory as they are stored until all of them are loaded."""

    def __init__(self, device: torch.device):
        if device.type != "cpu":
            raise ConfigError(f"This quantization computes on a CPU, not on {device.type}: use quantize=fp8.")

    def read(self, config: ModelConfig, quantize: bool) -> None:
        """Nothing is stored in this form."""

    def before_loading(self, model: nn.Module) -> None:
        """Give the layers their new classes. Raises `ConfigError` if a weight has no whole blocks."""
        classes = {
            LinearColParallelMerged: BlocksColParallel,
            LinearQKVMerged: BlocksQKV,
            LinearRowParallel: BlocksRowParallel,
        }
        convert(model, classes)
        for name, module in model.named_modules():
            if isinstance(module, BlocksLayer) and module.weight.shape[1] % BLOCK:
                raise ConfigError(f"This quantization has blocks of {BLOCK} columns: {name} has a part of a block.")

    def after_loading(self, model: nn.Module) -> None:
        """Pack the weights."""
        for module in model.modules():
            if isinstance(module, BlocksLayer):
                module.keep_packed()


@hookimpl
def minisgl_configs() -> Iterator[tuple[str, str, type]]:
    """Register the options of this plugin."""
    yield "quantization", "mine", Mine
