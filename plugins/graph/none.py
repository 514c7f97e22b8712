"""`graph=none`: every step runs operation by operation, without graphs. The default on a CPU, and easiest to debug."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from minisgl.hooks import hookimpl

if TYPE_CHECKING:
    from minisgl.plugins.graph.replaying.buckets import GraphKey


@dataclass
class NoGraph:
    """No graphs: every step runs eagerly."""

    def build(self) -> NoGraphRunner:
        return NoGraphRunner()


class NoGraphRunner:
    """Graph runner without buckets, which records nothing."""

    def buckets(self, max_rows: int) -> Sequence[GraphKey]:
        """Return no buckets."""
        return ()

    def capture(
        self,
        keys: Sequence[GraphKey],
        build: Callable[[GraphKey], Any],
        forward: Callable[[Any], torch.Tensor],
    ) -> None:
        """Do nothing. Raises ValueError if there are keys to record."""
        if keys:
            raise ValueError(f"graph=none records nothing, but was asked for {list(keys)}")

    def pick(self, rows: int, q_len: int, uniform: bool) -> GraphKey | None:
        """Return None: every step runs eagerly."""
        return None

    def run(self, key: GraphKey) -> torch.Tensor:
        """Raise ValueError, because there are no recordings."""
        raise ValueError(f"graph=none has no recording of {key}")

    def close(self) -> None:
        """Do nothing."""


@hookimpl
def minisgl_configs() -> Iterable[tuple[str, str, type]]:
    yield "graph", "none", NoGraph
