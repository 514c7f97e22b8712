"""Weight shards: which slice of which checkpoint tensor a rank loads into which parameter.

Layers list their shards; a `WeightSource` fills them. This module knows neither files nor formats
(`minisgl.models.weights` does). A layer never receives a whole checkpoint tensor if the rank needs only a slice.
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
    """One slice to load: ``target`` = checkpoint tensor ``name`` [``index``].

    ``shape`` is the shape of the whole checkpoint tensor; ``target`` is a view of a parameter, with the slice's shape.
    A subclass may read it in another form: see `load`.
    """

    name: str
    shape: tuple[int, ...]
    index: tuple[slice, ...]
    target: Tensor

    @staticmethod
    def whole(name: str, target: Tensor) -> WeightShard:
        """Return the shard of a tensor that every rank holds in full."""
        return WeightShard(name, tuple(target.shape), tuple(slice(0, n) for n in target.shape), target)

    @staticmethod
    def part(name: str, shape: tuple[int, ...], dim: int, start: int, target: Tensor) -> WeightShard:
        """Return the shard of the ``target.shape[dim]`` entries along ``dim`` that begin at ``start``."""
        index = [slice(0, n) for n in shape]
        index[dim] = slice(start, start + target.shape[dim])
        return WeightShard(name, shape, tuple(index), target)

    def load(self, source: WeightSource) -> None:
        """Fill the target from ``source``."""
        source.fill(self)


class WeightSource(Protocol):
    """A source of weights: a checkpoint, or a generator of random numbers."""

    @property
    def names(self) -> frozenset[str] | None:
        """The names of the tensors that the source has; None: it has any tensor."""

    def fill(self, shard: WeightShard) -> None:
        """Write the shard's slice into its target, converted to the target's dtype and device."""


@runtime_checkable
class HasWeightShards(Protocol):
    """A module that lists the shards of its own parameters."""

    def weight_shards(self, prefix: str, names: frozenset[str] | None) -> Iterator[WeightShard]:
        """Yield the shards to load.

        ``prefix`` is the module's name in the checkpoint, followed by a dot. ``names`` are the tensors that the source
        has, for layers that can load more than one checkpoint layout; None: the source has any tensor.
        """
        ...


def weight_shards_of(module: nn.Module, prefix: str, names: frozenset[str] | None) -> Iterator[WeightShard]:
    """Yield the shards that ``module`` lists or, if it can't list shards, those of its submodules.

    A submodule's name in the checkpoint is its attribute name, after ``prefix``.
    """
    if isinstance(module, HasWeightShards):
        yield from module.weight_shards(prefix, names)
        return
    for name, child in module.named_children():
        yield from weight_shards_of(child, f"{prefix}{name}.", names)


def split_rows(total: int, size: int, what: str) -> int:
    """Return ``total / size``. Raises ConfigError that names ``what`` if ``size`` does not divide ``total``."""
    if total % size:
        raise ConfigError(f"tp={size} does not divide the model's {what} ({total}); choose a tp that does.")
    return total // size
