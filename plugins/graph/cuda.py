"""`graph=cuda`: the kernel launches of a decode step, recorded once per batch-size bucket and replayed as one launch.

Hundreds of kernel launches cost the host milliseconds per step; a replay costs microseconds. A graph replays the same
kernels on the same addresses, so inputs are copied into static buffers, and a step is padded to the size of its bucket.
Small steps with prompts are replayed in pieces: one launch for all kernels between two calls of attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from minisgl.attention import GraphKey
from minisgl.config import ConfigError
from minisgl.hooks import hookimpl
from minisgl.plugins.graph.replaying import EARLY, BucketRunner, Buckets, check_sizes

if TYPE_CHECKING:
    from minisgl.plugins.graph.replaying.record import Recorder, Recording


@dataclass
class CudaGraph:
    """CUDA graphs for decode steps, and piecewise CUDA graphs for small steps with prompts."""

    early_context: ClassVar[str] = EARLY

    max_rows: int = 256
    """Largest bucket of decode rows. Decode steps with more rows are not replayed as one launch."""
    max_tokens: int = 1024
    """Largest number of tokens of a step with prompts that is replayed in pieces; 0: such steps are never replayed.
    Steps of exactly max_prefill_tokens tokens are replayed in pieces too."""

    def __post_init__(self) -> None:
        check_sizes(self.max_rows, self.max_tokens)

    def build(self, device: torch.device) -> CudaGraphRunner:
        if device.type != "cuda":
            raise ConfigError(
                f"CUDA graphs need a GPU, but the device is {device}: use graph=simulated, which has the same rules."
            )
        return CudaGraphRunner(self, device)


class CudaGraphRunner(BucketRunner):
    """Graph runner with CUDA graphs, which all share one memory pool.

    Buckets are recorded from the largest to the smallest, so that the smaller ones reuse the memory of the largest.
    """

    def __init__(self, config: CudaGraph, device: torch.device):
        self.config, self.device = config, device
        self._graphs: dict[GraphKey, Recording] = {}
        self._buckets = Buckets()
        self._recorder: Recorder | None = None

    def buckets(self, max_rows: int) -> Sequence[GraphKey]:
        """Return buckets of 1, 2, 4 and 8 rows, then multiples of 8 up to 64, of 16 up to 256, and of 32 beyond.

        The largest bucket has the smaller of ``max_rows`` and the option ``graph.max_rows`` rows.
        """
        top = min(max_rows, self.config.max_rows)
        sizes = {1, 2, 4, *range(8, 65, 8), *range(80, 257, 16), *range(288, top + 32, 32)}
        return [GraphKey(n) for n in sorted({s for s in sizes if s < top} | {top})]

    def piecewise(self, max_tokens: int) -> Sequence[GraphKey]:
        """Return buckets of multiples of 16 tokens up to 128, of 32 up to 256, of 64 beyond, and of ``max_tokens``.

        ``max_tokens`` is the largest step: long prompts are split into chunks of exactly that size. The multiples go up
        to the option ``graph.max_tokens``, which is a bucket itself unless ``max_tokens`` is smaller.
        """
        if not self.config.max_tokens:
            return []
        top = min(max_tokens, self.config.max_tokens)
        sizes = {*range(16, 129, 16), *range(160, 257, 32), *range(320, top, 64)}
        return [GraphKey(n, q_len=0) for n in sorted({s for s in sizes if s < top} | {top, max_tokens})]

    def capture(
        self,
        keys: Sequence[GraphKey],
        build: Callable[[GraphKey], Any],
        forward: Callable[[Any], torch.Tensor],
    ) -> None:
        """Record ``forward(build(key))`` for each key. Each recording follows a run that initialises libraries.

        A bucket that has a recording already gets another one, in the same memory pool.
        """
        from minisgl.plugins.graph.replaying.record import Recorder

        self._recorder = self._recorder or Recorder(self.device)
        for key in sorted(keys, reverse=True):
            self._graphs[key] = self._recorder.record(forward, build(key), piecewise=key.piecewise)
        self._buckets = Buckets(self._graphs)

    def pick(self, rows: int, q_len: int, uniform: bool) -> GraphKey | None:
        """Return the smallest bucket that holds ``rows`` decode rows. None: do not replay the step as one launch."""
        return self._buckets.smallest(rows, q_len) if uniform else None

    def pick_tokens(self, tokens: int) -> GraphKey | None:
        """Return the smallest piecewise bucket that holds ``tokens`` tokens, or None to run the step eagerly.

        Above ``graph.max_tokens``, padding would cost more than the launches that a replay saves. So a larger bucket
        is used only by steps that fill it exactly.
        """
        key = self._buckets.smallest(tokens, 0)
        fits = key is not None and (key.rows == tokens or key.rows <= self.config.max_tokens)
        return key if fits else None

    def run(self, key: GraphKey) -> torch.Tensor:
        """Replay a bucket. Returns the recorded output buffer, which the next replay of any bucket may overwrite."""
        return self._graphs[key].replay()

    def close(self) -> None:
        """Drop the CUDA graphs and their memory."""
        self._graphs.clear()
        self._buckets = Buckets()
        self._recorder = None


@hookimpl
def minisgl_configs() -> Iterable[tuple[str, str, type]]:
    yield "graph", "cuda", CudaGraph
