"""`graph=simulated`: the rules of CUDA graphs on a CPU. A decode step is recorded once a bucket and replayed as one.

Fixed shapes, static buffers, no look from the host: what breaks a rule is an error that names it, at start or at the
replay, where a GPU would give wrong answers in silence. The tape itself is `minisgl.engine.simulated_graph`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from minisgl.attention import GraphKey
from minisgl.config import ConfigError
from minisgl.engine.graph import Buckets, check_sizes
from minisgl.hooks import hookimpl

if TYPE_CHECKING:
    from minisgl.engine.simulated_graph import Tape


@dataclass
class Simulated:
    """Decode steps recorded and replayed on a CPU, under the rules of CUDA graphs."""

    max_rows: int = 64
    """Decode steps with more rows run operation by operation."""
    max_tokens: int = 0
    """Other steps of up to so many tokens are replayed in pieces, between the calls of attention; 0: none."""

    def __post_init__(self) -> None:
        check_sizes(self.max_rows, self.max_tokens)


class SimulatedRunner:
    """Tapes by bucket. ``operations`` of a bucket become one replay; ``replays`` and ``padded_rows`` (rows of a bucket,
    or tokens, that belonged to no request) count what was run."""

    def __init__(self, config: Simulated):
        self.config = config
        self.tapes: dict[GraphKey, Tape] = {}
        self.padded_rows = 0
        self._buckets = Buckets()

    @property
    def operations(self) -> dict[GraphKey, int]:
        return {key: len(tape.operations) for key, tape in self.tapes.items()}

    @property
    def replays(self) -> int:
        return sum(tape.replays for tape in self.tapes.values())

    def buckets(self, max_rows: int) -> Sequence[GraphKey]:
        """Powers of two, and the largest number of rows there can be."""
        top = min(max_rows, self.config.max_rows)
        return [GraphKey(1 << i) for i in range((top - 1).bit_length())] + [GraphKey(top)]

    def piecewise(self, most: int) -> Sequence[GraphKey]:
        """Powers of two from 16 tokens on, and the largest number."""
        top = min(most, self.config.max_tokens)
        return [GraphKey(n, q_len=0) for n in [*(16 << i for i in range(32) if 16 << i < top), top] if n]

    def capture(
        self,
        keys: Sequence[GraphKey],
        build: Callable[[GraphKey], Any],
        forward: Callable[[Any], torch.Tensor],
    ) -> None:
        """Record ``forward`` for each key. Raises `ConfigError` where the model can't be recorded."""
        from minisgl.engine.simulated_graph import GraphViolation, record

        for key in keys:
            inputs = build(key)
            try:
                self.tapes[key] = record(partial(forward, inputs), inputs, piecewise=key.piecewise)
            except GraphViolation as error:
                what = "tokens" if key.piecewise else "rows"
                raise ConfigError(
                    f"graph=simulated can't record a step of {key.rows} {what}: {error}\n"
                    "  Use another backend for what stands there, or graph=none."
                ) from error
        self._buckets = Buckets(self.tapes)

    def pick(self, rows: int, q_len: int, uniform: bool) -> GraphKey | None:
        """The smallest bucket that holds ``rows`` decode rows."""
        return self._padded(self._buckets.smallest(rows, q_len) if uniform else None, rows)

    def pick_tokens(self, tokens: int) -> GraphKey | None:
        """The smallest bucket that holds so many tokens."""
        return self._padded(self._buckets.smallest(tokens, 0), tokens)

    def _padded(self, key: GraphKey | None, used: int) -> GraphKey | None:
        self.padded_rows += key.rows - used if key is not None else 0
        return key

    def run(self, key: GraphKey) -> torch.Tensor:
        """Replay; the result is the recorded output, overwritten by the bucket's next replay."""
        return self.tapes[key].replay()

    def close(self) -> None:
        self.tapes.clear()
        self._buckets = Buckets()


@hookimpl
def minisgl_configs() -> Iterable[tuple[str, str, type]]:
    yield "graph", "simulated", Simulated


@hookimpl
def minisgl_graph(config: Any, device: torch.device) -> SimulatedRunner | None:
    if not isinstance(config, Simulated):
        return None
    if device.type != "cpu":
        raise ConfigError(f"it runs on a CPU, and the device is {device}: use graph=cuda there.")
    return SimulatedRunner(config)
