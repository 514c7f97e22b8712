"""`graph=cuda`: a decode step's launches recorded once for each batch-size bucket, and replayed as one.

Hundreds of kernel launches cost the host milliseconds a step; a replay costs microseconds. A graph replays the same
kernels on the same addresses, so inputs are copied into static buffers and a step is padded up to its bucket.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from minisgl.attention import GraphKey
from minisgl.hooks import hookimpl

if TYPE_CHECKING:
    from minisgl.engine.record import Recording


@dataclass
class CudaGraph:
    """CUDA graphs for decode steps, by bucket of rows."""

    max_rows: int = 256
    """Decode steps with more rows run operation by operation."""


class CudaGraphRunner:
    """Recordings that share one memory pool; the largest is made first, so that the others fit into its memory."""

    def __init__(self, config: CudaGraph, device: torch.device):
        self.config, self.device = config, device
        self._graphs: dict[GraphKey, Recording] = {}
        self._sizes: list[int] = []

    def buckets(self, max_rows: int) -> Sequence[GraphKey]:
        """1, 2, 4, 8, then multiples of 8 up to 64, of 16 up to 256, of 32 beyond."""
        top = min(max_rows, self.config.max_rows)
        sizes = {1, 2, 4, *range(8, 65, 8), *range(80, 257, 16), *range(288, top + 32, 32)}
        return [GraphKey(n) for n in sorted({s for s in sizes if s < top} | {top})]

    def capture(
        self,
        keys: Sequence[GraphKey],
        build: Callable[[GraphKey], Any],
        forward: Callable[[Any], torch.Tensor],
    ) -> None:
        """Record ``forward`` for each key, after one run that is not recorded: libraries set themselves up in it."""
        from minisgl.engine.record import Recorder

        recorder = Recorder(self.device)
        for key in sorted(keys, reverse=True):
            self._graphs[key] = recorder.record(forward, build(key))
        self._sizes = sorted(key.rows for key in self._graphs)

    def pick(self, rows: int, q_len: int, uniform: bool) -> GraphKey | None:
        """The smallest bucket that holds ``rows`` decode rows."""
        if not uniform or q_len != 1 or not self._sizes or rows > self._sizes[-1]:
            return None
        return GraphKey(self._sizes[bisect_left(self._sizes, rows)])

    def run(self, key: GraphKey) -> torch.Tensor:
        """Replay; the result is the recorded output buffer, overwritten by the next replay of any bucket."""
        return self._graphs[key].replay()

    def close(self) -> None:
        self._graphs.clear()
        self._sizes = []


@hookimpl
def minisgl_configs() -> Iterable[tuple[str, str, type]]:
    yield "graph", "cuda", CudaGraph


@hookimpl
def minisgl_graph(config: Any, device: torch.device) -> CudaGraphRunner | None:
    return CudaGraphRunner(config, device) if isinstance(config, CudaGraph) else None
