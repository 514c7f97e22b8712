"""Which part of which checkpoint tensor a rank wants, and where it goes. Layers say it, a `WeightSource` fills it.

Knows neither files nor formats: minisgl.models.weights does. A layer never sees a whole checkpoint tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor, nn

from minisgl.config import ConfigError

__all__ = ["HasWeightShards", "WeightShard", "WeightSource", "split_rows", "weight_shards_of"]


@dataclass(frozen=True, slots=True)
class WeightShard:
    """``target`` (a view of a parameter) takes ``index`` of the checkpoint's tensor ``name``, which has ``shape``."""

    name: str
    shape: tuple[int, ...]
    index: tuple[slice, ...]
    target: Tensor

    @staticmethod
    def whole(name: str, target: Tensor) -> WeightShard:
        """A tensor that every rank has in full."""
        return WeightShard(name, tuple(target.shape), tuple(slice(0, n) for n in target.shape), target)

    @staticmethod
    def part(name: str, shape: tuple[int, ...], dim: int, start: int, target: Tensor) -> WeightShard:
        """The ``target.shape[dim]`` entries along ``dim`` from ``start`` on."""
        index = [slice(0, n) for n in shape]
        index[dim] = slice(start, start + target.shape[dim])
        return WeightShard(name, shape, tuple(index), target)


class WeightSource(Protocol):
    """Where weights come from."""

    @property
    def names(self) -> frozenset[str] | None:
        """The tensors it has; None: whatever is asked for."""

    def fill(self, piece: WeightShard) -> None:
        """Write the piece's part into its target, converted to the target's dtype and device."""


@runtime_checkable
class HasWeightShards(Protocol):
    """A module with parameters of its own. ``prefix`` is its name in the checkpoint with a dot behind it, ``names``
    the tensors that the source has (for layers that more than one layout of checkpoint can fill)."""

    def weight_shards(self, prefix: str, names: frozenset[str] | None) -> Iterator[WeightShard]: ...


def weight_shards_of(module: nn.Module, prefix: str, names: frozenset[str] | None) -> Iterator[WeightShard]:
    """Everything ``module`` and the modules in it want; attribute names are the checkpoint's names."""
    if isinstance(module, HasWeightShards):
        yield from module.weight_shards(prefix, names)
        return
    for name, child in module.named_children():
        yield from weight_shards_of(child, f"{prefix}{name}.", names)


def split_rows(total: int, size: int, what: str) -> int:
    """``total / size``; raises ConfigError, naming ``what``, where the ranks don't divide it."""
    if total % size:
        raise ConfigError(f"tp={size} does not divide the model's {what} ({total}); choose a tp that does.")
    return total // size
