"""`graph=cuda`: a decode step's launches recorded once for each batch-size bucket, and replayed as one.

Hundreds of kernel launches cost the host milliseconds a step; a replay costs microseconds. A graph replays the same
kernels on the same addresses, so inputs are copied into static buffers and a step is padded up to its bucket. Steps
with prompts, while they are small, are replayed in pieces: one launch for all that lies between two calls of attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from minisgl.attention import GraphKey
from minisgl.config import ConfigError
from minisgl.engine.graph import Buckets, check_sizes
from minisgl.hooks import hookimpl

if TYPE_CHECKING:
    from minisgl.engine.record import Recording


@dataclass
class CudaGraph:
    """CUDA graphs for decode steps, by bucket of rows, and for what lies between the attention of other small steps."""

    max_rows: int = 256
    """Decode steps with more rows are not one launch."""
    max_tokens: int = 1024
    """Other steps of up to so many tokens, and those of exactly max_prefill_tokens, are replayed in pieces; 0: none."""

    def __post_init__(self) -> None:
        check_sizes(self.max_rows, self.max_tokens)


class CudaGraphRunner:
    """Recordings that share one memory pool; the largest is made first, so that the others fit into its memory."""

    def __init__(self, config: CudaGraph, device: torch.device):
        self.config, self.device = config, device
        self._graphs: dict[GraphKey, Recording] = {}
        self._buckets = Buckets()

    def buckets(self, max_rows: int) -> Sequence[GraphKey]:
        """1, 2, 4, 8, then multiples of 8 up to 64, of 16 up to 256, of 32 beyond."""
        top = min(max_rows, self.config.max_rows)
        sizes = {1, 2, 4, *range(8, 65, 8), *range(80, 257, 16), *range(288, top + 32, 32)}
        return [GraphKey(n) for n in sorted({s for s in sizes if s < top} | {top})]

    def piecewise(self, most: int) -> Sequence[GraphKey]:
        """Multiples of 16 tokens up to 128, of 32 up to 256, of 64 beyond; and ``most``: long prompts are cut into
        chunks of just so many."""
        if not self.config.max_tokens:
            return []
        top = min(most, self.config.max_tokens)
        sizes = {*range(16, 129, 16), *range(160, 257, 32), *range(320, top, 64)}
        return [GraphKey(n, q_len=0) for n in sorted({s for s in sizes if s < top} | {top, most})]

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
            self._graphs[key] = recorder.record(forward, build(key), piecewise=key.piecewise)
        self._buckets = Buckets(self._graphs)

    def pick(self, rows: int, q_len: int, uniform: bool) -> GraphKey | None:
        """The smallest bucket that holds ``rows`` decode rows."""
        return self._buckets.smallest(rows, q_len) if uniform else None

    def pick_tokens(self, tokens: int) -> GraphKey | None:
        """The smallest that holds so many tokens; beyond ``max_tokens``, where padding would cost more than launching
        does, the one that they fill."""
        key = self._buckets.smallest(tokens, 0)
        fits = key is not None and (key.rows == tokens or key.rows <= self.config.max_tokens)
        return key if fits else None

    def run(self, key: GraphKey) -> torch.Tensor:
        """Replay; the result is the recorded output buffer, overwritten by the next replay of any bucket."""
        return self._graphs[key].replay()

    def close(self) -> None:
        self._graphs.clear()
        self._buckets = Buckets()


@hookimpl
def minisgl_configs() -> Iterable[tuple[str, str, type]]:
    yield "graph", "cuda", CudaGraph


@hookimpl
def minisgl_graph(config: Any, device: torch.device) -> CudaGraphRunner | None:
    if not isinstance(config, CudaGraph):
        return None
    if device.type != "cuda":
        raise ConfigError(
            f"it records on GPUs, and the device is {device}: graph=simulated keeps the same rules there."
        )
    return CudaGraphRunner(config, device)
