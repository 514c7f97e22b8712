"""Lab replay: Hundreds of launches become one.

Grade it:  python -m minisgl.lab test replay     (`hint replay` for a hint)
Serve it:  python -m minisgl plugins=my_replay.py graph=mine
"""

# minisgl lab replay, skeleton e0e3e7206a (minisgl 0.2.0)

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from minisgl.attention import AttnBatch, GraphKey
from minisgl.core import I32, EngineSpec
from minisgl.hooks import hookimpl

if TYPE_CHECKING:
    from minisgl.engine.graph import GraphRunner
    from minisgl.engine.record import Recording


@dataclass
class Mine:
    """Decode steps recorded once a bucket and replayed as one launch, on a GPU or a CPU."""

    max_rows: int = 64
    """Decode steps with more rows run operation by operation."""


class Buffers:
    """The inputs of one bucket's recording, see `minisgl.engine.graph.StaticInputs`.

    ``packed`` is int32 [5, rows]: for each row its token's id (or PENDING), its position, its place in the pool
    (page · page_size + offset), its slot, and how many positions it reads.
    """

    def __init__(self, key: GraphKey, spec: EngineSpec, table: torch.Tensor, device: torch.device):
        from minisgl.engine.inputs import ModelInputs

        self.key, self.spec, self.table, self.device = key, spec, table, device
        self.packed = torch.zeros((5, key.rows), dtype=torch.int32, device=device)
        self.tokens = ModelInputs(self.packed, pending=True)
        self.indptr_host = np.arange(key.rows + 1, dtype=np.int32)  # one query a row: row r's is query r
        self.indptr = torch.from_numpy(self.indptr_host).to(device)

    def padding(self) -> I32:
        """A row that belongs to no request, as a column of ``packed``: int32 [5]."""
        # TODO replay.buffers
        # 1. It writes its KV somewhere at each replay. Page 0 may be anybody's; page num_pages is the scratch page.
        # 2. It is a decode row like any other: position 0 of the scratch slot, which reads one position.
        raise NotImplementedError

    def fill(self, packed: I32 | None) -> AttnBatch:
        """Take over a step's rows, int32 [5, n] with n at most the bucket's (None: no rows)."""
        # TODO replay.buffers
        # 3. Every row anew: behind a small step, a larger one's rows still stand there, with their lengths.
        # 4. Into the buffer that was recorded: a new tensor would never be looked at.
        raise NotImplementedError


class MyRunner:
    """See `minisgl.engine.graph.GraphRunner` for what is asked for and when. Counts ``replays``, and ``padded_rows``:
    rows that were computed for nobody."""

    def __init__(self, config: Mine, device: torch.device):
        self.config, self.device = config, device
        self.recordings: dict[GraphKey, Recording] = {}
        self.replays = self.padded_rows = 0

    def input_buffers(self, key: GraphKey, spec: EngineSpec, table: torch.Tensor, device: torch.device) -> Buffers:
        """A bucket's buffers; ``table`` is the live page table [slots + 1, columns]."""
        return Buffers(key, spec, table, device)

    def buckets(self, max_rows: int) -> list[GraphKey]:
        """What to record, for steps of at most ``max_rows`` rows."""
        return [GraphKey(size) for size in self.sizes(min(max_rows, self.config.max_rows))]

    def pick(self, rows: int, q_len: int, uniform: bool) -> GraphKey | None:
        """The bucket for a step, or None where it runs operation by operation: too large, or with a prompt in it."""
        key = self.bucket(rows) if uniform and q_len == 1 else None
        if key is not None:
            self.padded_rows += key.rows - rows
        return key

    def sizes(self, most: int) -> list[int]:
        """The rows of each bucket, rising."""
        # TODO replay.buckets
        # 1. Each recording takes memory and time at the start: a few sizes, each at most twice the one before.
        # 2. The largest step must fit too.
        raise NotImplementedError

    def bucket(self, rows: int) -> GraphKey | None:
        """The smallest recorded bucket that holds ``rows`` rows; None where there is none."""
        # TODO replay.buckets
        # 3. Rows of padding cost as much as others.
        raise NotImplementedError

    def capture(
        self,
        keys: Sequence[GraphKey],
        build: Callable[[GraphKey], Any],
        forward: Callable[[Any], torch.Tensor],
    ) -> None:
        """Record ``forward(inputs)`` for each bucket, on the inputs that ``build(key)`` makes (those of `frame`)."""
        # TODO replay.capture
        # 1. They share memory, and no two run at once: the largest first, so that the others fit into its own.
        raise NotImplementedError

    def run(self, key: GraphKey) -> torch.Tensor:
        """Replay a bucket, whose buffers hold the step's rows."""
        # TODO replay.capture
        # 2. One launch, however many were recorded; the result stands where it stood in the recording.
        raise NotImplementedError

    def close(self) -> None:
        """Drop the recordings, and the memory that they hold."""
        self.recordings.clear()


@hookimpl
def minisgl_configs() -> Iterator[tuple[str, str, type]]:
    yield "graph", "mine", Mine


class Plugin:
    """Makes the runner of one engine, and tells what it did."""

    def __init__(self) -> None:
        self.runner: MyRunner | None = None

    @hookimpl
    def minisgl_graph(self, config: Any, device: torch.device) -> GraphRunner | None:
        if not isinstance(config, Mine):
            return None
        self.runner = MyRunner(config, device)
        return self.runner

    @hookimpl
    def minisgl_metrics(self) -> str:
        if self.runner is None:
            return ""
        counts = {"replays": self.runner.replays, "padded_rows": self.runner.padded_rows}
        return "".join(f"# TYPE minisgl_graph_{n} counter\nminisgl_graph_{n}_total {c}\n" for n, c in counts.items())
