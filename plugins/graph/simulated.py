"""`graph=simulated`: decode steps recorded and replayed on a CPU, under the rules of CUDA graphs.

The rules are, among others: fixed shapes, static buffers, no reads of tensor values on the host. Code that breaks a
rule raises an error that names the rule, at start or at the replay. On a GPU the same code may silently compute wrong
results. `minisgl.plugins.graph.replaying.simulated_graph` implements recording and replay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from minisgl.attention import GraphKey
from minisgl.config import ConfigError
from minisgl.hooks import hookimpl
from minisgl.plugins.graph.replaying import BucketRunner, Buckets, check_sizes

if TYPE_CHECKING:
    from minisgl.plugins.graph.replaying.simulated_graph import SimulatedGraph


@dataclass
class Simulated:
    """Decode steps recorded and replayed on a CPU, under the rules of CUDA graphs."""

    max_rows: int = 64
    """Largest bucket of decode rows. Decode steps with more rows run operation by operation."""
    max_tokens: int = 0
    """Largest number of tokens of a step with prompts that is replayed in pieces; 0: such steps are never replayed."""

    def __post_init__(self) -> None:
        check_sizes(self.max_rows, self.max_tokens)

    def build(self, device: torch.device) -> SimulatedRunner:
        if device.type != "cpu":
            raise ConfigError(f"graph=simulated runs on a CPU, but the device is {device}: use graph=cuda.")
        return SimulatedRunner(self)


class SimulatedRunner(BucketRunner):
    """Graph runner with a simulated graph for each bucket.

    ``padded_rows`` counts the padding rows (in piecewise buckets: tokens) of all replays.
    """

    def __init__(self, config: Simulated):
        self.config = config
        self.graphs: dict[GraphKey, SimulatedGraph] = {}
        self.padded_rows = 0
        self._buckets = Buckets()

    @property
    def operations(self) -> dict[GraphKey, int]:
        """Number of recorded operations of each bucket. In piecewise buckets, calls of attention count too."""
        return {key: len(graph.operations) for key, graph in self.graphs.items()}

    @property
    def replays(self) -> int:
        """Number of replays of all buckets."""
        return sum(graph.replays for graph in self.graphs.values())

    def buckets(self, max_rows: int) -> Sequence[GraphKey]:
        """Return buckets of powers of two, up to and including the smaller of ``max_rows`` and graph.max_rows."""
        top = min(max_rows, self.config.max_rows)
        return [GraphKey(1 << i) for i in range((top - 1).bit_length())] + [GraphKey(top)]

    def piecewise(self, max_tokens: int) -> Sequence[GraphKey]:
        """Return piecewise buckets of powers of two from 16 tokens on, and of the largest number of tokens."""
        top = min(max_tokens, self.config.max_tokens)
        return [GraphKey(n, q_len=0) for n in [*(16 << i for i in range(32) if 16 << i < top), top] if n]

    def capture(
        self,
        keys: Sequence[GraphKey],
        build: Callable[[GraphKey], Any],
        forward: Callable[[Any], torch.Tensor],
    ) -> None:
        """Record ``forward(build(key))`` for each key. Raises `ConfigError` if the model or a backend breaks a rule."""
        from minisgl.plugins.graph.replaying.simulated_graph import GraphViolation, record

        for key in keys:
            inputs = build(key)
            try:
                self.graphs[key] = record(partial(forward, inputs), inputs, piecewise=key.piecewise)
            except GraphViolation as error:
                unit = "tokens" if key.piecewise else "rows"
                raise ConfigError(
                    f"graph=simulated can't record a step of {key.rows} {unit}: {error}\n"
                    "  Choose another backend for the operation at that source line, or use graph=none."
                ) from error
        self._buckets = Buckets(self.graphs)

    def pick(self, rows: int, q_len: int, uniform: bool) -> GraphKey | None:
        """Return the smallest bucket that holds ``rows`` decode rows. None: do not replay the step as one launch."""
        return self._padded(self._buckets.smallest(rows, q_len) if uniform else None, rows)

    def pick_tokens(self, tokens: int) -> GraphKey | None:
        """Return the smallest piecewise bucket that holds ``tokens`` tokens, or None to run the step eagerly."""
        return self._padded(self._buckets.smallest(tokens, 0), tokens)

    def _padded(self, key: GraphKey | None, used: int) -> GraphKey | None:
        """Add the bucket's padding, beside ``used`` rows or tokens of the step, to `padded_rows`. Returns ``key``."""
        self.padded_rows += key.rows - used if key is not None else 0
        return key

    def run(self, key: GraphKey) -> torch.Tensor:
        """Replay a bucket. Returns the recorded output tensor, which the bucket's next replay overwrites."""
        return self.graphs[key].replay()

    def close(self) -> None:
        """Drop the simulated graphs."""
        self.graphs.clear()
        self._buckets = Buckets()


@hookimpl
def minisgl_configs() -> Iterable[tuple[str, str, type]]:
    yield "graph", "simulated", Simulated
