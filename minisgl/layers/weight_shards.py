"""Which part of which checkpoint tensor a rank wants, and where it goes. Layers say it, a `Source` fills it.

Knows neither files nor formats: minisgl.models.weights does. A layer never sees a whole checkpoint tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor, nn

from minisgl.config import ConfigError

__all__ = ["HasPieces", "Piece", "Source", "pieces_of", "split_rows"]


@dataclass(frozen=True, slots=True)
class Piece:
    """``target`` (a view of a parameter) takes ``index`` of the checkpoint's tensor ``name``, which has ``shape``."""

    name: str
    shape: tuple[int, ...]
    index: tuple[slice, ...]
    target: Tensor

    @staticmethod
    def whole(name: str, target: Tensor) -> Piece:
        """A tensor that every rank has in full."""
        return Piece(name, tuple(target.shape), tuple(slice(0, n) for n in target.shape), target)

    @staticmethod
    def part(name: str, shape: tuple[int, ...], dim: int, start: int, target: Tensor) -> Piece:
        """The ``target.shape[dim]`` entries along ``dim`` from ``start`` on."""
        index = [slice(0, n) for n in shape]
        index[dim] = slice(start, start + target.shape[dim])
        return Piece(name, shape, tuple(index), target)


class Source(Protocol):
    """Where weights come from."""

    @property
    def names(self) -> frozenset[str] | None:
        """The tensors it has; None: whatever is asked for."""

    def fill(self, piece: Piece) -> None:
        """Write the piece's part into its target, converted to the target's dtype and device."""


@runtime_checkable
class HasPieces(Protocol):
    """A module with parameters of its own. ``prefix`` is its name in the checkpoint with a dot behind it, ``names``
    the tensors that the source has (for layers that more than one layout of checkpoint can fill)."""

    def pieces(self, prefix: str, names: frozenset[str] | None) -> Iterator[Piece]: ...


def pieces_of(module: nn.Module, prefix: str, names: frozenset[str] | None) -> Iterator[Piece]:
    """Everything ``module`` and the modules in it want; attribute names are the checkpoint's names."""
    if isinstance(module, HasPieces):
        yield from module.pieces(prefix, names)
        return
    for name, child in module.named_children():
        yield from pieces_of(child, f"{prefix}{name}.", names)


def split_rows(total: int, size: int, what: str) -> int:
    """``total / size``; raises ConfigError, naming ``what``, where the ranks don't divide it."""
    if total % size:
        raise ConfigError(f"tp={size} does not divide the model's {what} ({total}); choose a tp that does.")
    return total // size
