"""Linear layers in integers of 8 bits, in which numbers that are too large for them are multiplied beside.

A weight has a scale for each output, and an activation a scale for each row. A few activations of a large model are
many times as large as all others: as integers, they would leave no steps for the others. So numbers from `threshold` on
are multiplied in float32, with their columns of the weight.
"""

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


@dataclass
class Outliers:
    """Linear layers in integers of 8 bits, and large activations in float32."""

    methods: ClassVar[tuple[str, ...]] = ()

    threshold: float = 6.0
    """Activations of this absolute value or a larger one are no integers."""

    def build(self, device: torch.device, dtype: torch.dtype, build_part: Callable[[str], Any]) -> Quantization:
        return OutlierConverter(device, Product(self.threshold))


@dataclass(frozen=True, slots=True)
class Packed:
    """A matrix [outputs, columns]: the number in column i of row o is ``integers[o, i] * scales[o, 0]``."""

    integers: Tensor  # int8 [outputs, columns]
    scales: Tensor  # float32 [outputs, 1]


class Product:
    """The product of activations with a packed weight."""

    def __init__(self, threshold: float):
        self.threshold = threshold

    def pack(self, x: Tensor) -> Packed:
        """Return a matrix in integers, with a scale for each row."""
        scales = x.float().abs().amax(1, keepdim=True) / 127
        steps = torch.where(scales > 0, x.float() / scales, 0.0)
        return Packed(steps.round().to(torch.int8), scales)

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the part of x [rows, columns] for integers, the columns with large numbers, and the rest of x there.

        The two parts of x add up to x.
        """
        large = x.abs() >= self.threshold
        columns = large.any(0).nonzero().flatten()
        inner = x.masked_fill(large, 0.0)
        return inner, columns, (x - inner)[:, columns]

    def multiply(self, x: Tensor, weight: Packed, bias: Tensor | None = None) -> Tensor:
        """Return x [rows, columns] times the transposed weight, plus the bias, in the dtype of x."""
        inner, columns, outer = self.split(x.float())
        packed = self.pack(inner)
        sums = packed.integers.double() @ weight.integers.double().T  # exact
        total = sums.float() * packed.scales * weight.scales.T
        if len(columns):
            total += outer @ (weight.integers[:, columns].float() * weight.scales).T
        return (total if bias is None else total + bias.float()).to(x.dtype)


class OutlierLayer(nn.Module):
    """A linear layer whose weight becomes `Packed` when it has been loaded."""

    weight: nn.Parameter
    packed: Packed
    product: Product

    def keep_packed(self, product: Product) -> None:
        """Pack the weight, and free it."""
        self.product, self.packed = product, product.pack(self.weight.detach())
        del self.weight

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply x [..., columns] with the packed weight."""
        return self.product.multiply(x.reshape(-1, x.shape[-1]), self.packed, bias).view(*x.shape[:-1], -1)


class OutlierMerged(OutlierLayer):
    """A merged column-parallel layer."""

    bias: nn.Parameter | None

    def forward(self, x: Tensor) -> Tensor:
        """Multiply x with all parts: see `minisgl.layers.linear.Merged`."""
        return self.multiply(x, self.bias)


class OutlierColParallel(OutlierMerged, LinearColParallelMerged):
    """`LinearColParallelMerged` of integers."""


class OutlierQKV(OutlierMerged, LinearQKVMerged):
    """`LinearQKVMerged` of integers."""


class OutlierRowParallel(OutlierLayer, LinearRowParallel):
    """`LinearRowParallel` of integers."""

    def forward(self, x: Tensor) -> Tensor:
        """Multiply x [..., in / size]: see `LinearRowParallel`."""
        y = self.multiply(x, self.bias if self.comm.rank == 0 else None)
        return self.comm.all_reduce(y) if self.reduce else y


class OutlierConverter(Quantization):
    """Packs the linear layers when the weights are loaded."""

    def __init__(self, device: torch.device, product: Product):
        if device.type != "cpu":
            raise ConfigError(f"This quantization computes on a CPU, not on {device.type}: use quantize=fp8.")
        self.product = product

    def read(self, config: ModelConfig, quantize: bool) -> None:
        """Nothing is stored in this form."""

    def before_loading(self, model: nn.Module) -> None:
        """Give the layers their new classes."""
        classes = {
            LinearColParallelMerged: OutlierColParallel,
            LinearQKVMerged: OutlierQKV,
            LinearRowParallel: OutlierRowParallel,
        }
        convert(model, classes)

    def after_loading(self, model: nn.Module) -> None:
        """Pack the weights."""
        for module in model.modules():
            if isinstance(module, OutlierLayer):
                module.keep_packed(self.product)


@hookimpl
def minisgl_configs() -> Iterator[tuple[str, str, type]]:
    """Register the options of this plugin."""
    yield "quantization", "museum", Outliers
