"""What a graph runner is asked for: record the launches of a step once, and replay them as one, or in pieces.

A decode step is one launch. One with prompts is a launch for each stretch between two calls of attention, whose kernels
depend on the lengths: `minisgl.engine.piecewise`. How launches are recorded is `minisgl.engine.record`'s business.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from minisgl.attention import AttnBatch, GraphKey
from minisgl.core import I32

if TYPE_CHECKING:
    from torch import Tensor

    from minisgl.engine.inputs import ModelInputs

__all__ = ["Buckets", "GraphKey", "GraphRunner", "StaticInputs", "check_sizes"]


class StaticInputs(Protocol):
    """The inputs of one bucket: tensors that stay where they are, since a recording reads them there."""

    @property
    def tokens(self) -> ModelInputs:
        """What the model's forward pass takes: ``packed`` [4 or more, rows] int32: ids (or PENDING), positions, places
        in the pool, slots."""

    def fill(self, packed: I32 | None) -> AttnBatch:
        """Take over a step's rows: ids, positions, places, slots and KV lengths, int32 [5, rows] on the host, at most
        as many as the bucket has. The others (None: all) are padding, which computes position 0 of the scratch slot,
        with its KV in the scratch page. Returns the bucket's rows as what attention is to plan."""


class GraphRunner(Protocol):
    """Records and replays decode steps by batch-size bucket. One that has a method ``frame(key, spec, table, device)``
    makes each bucket's `StaticInputs` itself; for the others the engine does. One that has a method ``piecewise(most)``
    names buckets for the other steps, which have at most ``most`` tokens (see `GraphKey`), and finds the one for a step
    in ``pick_tokens(tokens)``."""

    def buckets(self, max_rows: int) -> Sequence[GraphKey]:
        """The buckets it wants for at most ``max_rows`` decode rows; none: every step runs eagerly."""

    def capture(
        self,
        keys: Sequence[GraphKey],
        build: Callable[[GraphKey], Any],
        forward: Callable[[Any], Tensor],
    ) -> None:
        """For each key, ``build`` its static input buffers and record ``forward`` on them, in pieces where it says so
        (`Recorder.record`)."""

    def pick(self, rows: int, q_len: int, uniform: bool) -> GraphKey | None:
        """The smallest captured bucket for a step of ``rows`` rows, or None: run it eagerly."""

    def run(self, key: GraphKey) -> Tensor:
        """Replay; the inputs were written into ``build(key)``'s buffers. Returns the recorded output buffer."""

    def close(self) -> None:
        """Drop the recordings; called before the communicator closes."""


class Buckets:
    """Recorded buckets by size: those of decode rows, and those of tokens (``q_len`` 0)."""

    def __init__(self, keys: Iterable[GraphKey] = ()):
        self._sizes: dict[int, list[int]] = {}
        for key in sorted(key for key in keys if not key.shared_prefix):
            self._sizes.setdefault(key.q_len, []).append(key.rows)

    def smallest(self, rows: int, q_len: int) -> GraphKey | None:
        """The smallest that holds ``rows``; None: none does."""
        sizes = self._sizes.get(q_len, [])
        i = bisect_left(sizes, rows)
        return GraphKey(sizes[i], q_len) if i < len(sizes) else None


def check_sizes(max_rows: int, max_tokens: int) -> None:
    """Raise ValueError unless a runner can have such options."""
    if max_rows < 1 or max_tokens < 0:
        raise ValueError(f"graph.max_rows={max_rows} and graph.max_tokens={max_tokens}: at least 1 and 0")
