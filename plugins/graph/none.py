"""No graphs: every decode step is launched operation by operation. What a CPU runs, and the simplest to debug."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from minisgl.hooks import hookimpl

if TYPE_CHECKING:
    from minisgl.engine.graph import GraphKey


@dataclass
class NoGraph:
    """Run every step eagerly."""


class NoGraphRunner:
    """A graph runner that wants no buckets and so never records anything."""

    def buckets(self, max_rows: int) -> Sequence[GraphKey]:
        return ()

    def capture(
        self,
        keys: Sequence[GraphKey],
        build: Callable[[GraphKey], Any],
        forward: Callable[[Any], torch.Tensor],
    ) -> None:
        if keys:
            raise ValueError(f"graph=none records nothing, but was asked for {list(keys)}")

    def pick(self, rows: int, q_len: int, uniform: bool) -> GraphKey | None:
        return None

    def run(self, key: GraphKey) -> torch.Tensor:
        raise ValueError(f"graph=none has no recording of {key}")

    def close(self) -> None:
        pass


@hookimpl
def minisgl_configs() -> Iterable[tuple[str, str, type]]:
    yield "graph", "none", NoGraph


@hookimpl
def minisgl_graph(config: Any, device: torch.device) -> NoGraphRunner | None:
    return NoGraphRunner() if isinstance(config, NoGraph) else None
