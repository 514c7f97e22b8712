"""`graph=replay`: buckets, static buffers, padding and replay, all in one file to be read; on a GPU and on a CPU.

A decode step launches hundreds of kernels, and the host pays for each. Recorded once and replayed, they are one launch;
the price is that everything stays where it was recorded, as large as it was. What records is the core's
(`minisgl.engine.record`): a CUDA graph, or on a CPU a tape that names the rule that was broken.
"""

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
class Replay:
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

    # lab: replay.buffers
    def padding(self) -> I32:
        """A row that belongs to no request, as a column of ``packed``: int32 [5]."""
        # 1. It writes its KV somewhere at each replay. Page 0 may be anybody's; page num_pages is the scratch page.
        # 2. It is a decode row like any other: position 0 of the scratch slot, which reads one position.
        scratch = self.spec.num_pages * self.spec.page_size
        return np.array([0, 0, scratch, self.spec.max_running_requests, 1], np.int32)

    def fill(self, packed: I32 | None) -> AttnBatch:
        """Take over a step's rows, int32 [5, n] with n at most the bucket's (None: no rows)."""
        # 3. Every row anew: behind a small step, a larger one's rows still stand there, with their lengths.
        host = np.repeat(self.padding()[:, None], self.key.rows, axis=1)
        if packed is not None:
            host[:, : packed.shape[1]] = packed
        # 4. Into the buffer that was recorded: a new tensor would never be looked at.
        self.packed.copy_(torch.from_numpy(host), non_blocking=True)
        slots, lengths = self.packed[3], self.packed[4]
        return AttnBatch(self.key.rows, self.indptr_host, host[4], self.indptr, lengths, slots, self.table, self.key)

    # lab: end


class ReplayRunner:
    """See `minisgl.engine.graph.GraphRunner` for what is asked for and when. Counts ``replays``, and ``padded_rows``:
    rows that were computed for nobody."""

    def __init__(self, config: Replay, device: torch.device):
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

    # lab: replay.buckets
    def sizes(self, most: int) -> list[int]:
        """The rows of each bucket, rising."""
        # 1. Each recording takes memory and time at the start: a few sizes, each at most twice the one before.
        # 2. The largest step must fit too.
        return [*(1 << i for i in range((most - 1).bit_length())), most]

    def bucket(self, rows: int) -> GraphKey | None:
        """The smallest recorded bucket that holds ``rows`` rows; None where there is none."""
        # 3. Rows of padding cost as much as others.
        return min((key for key in self.recordings if key.rows >= rows), default=None)

    # lab: end

    # lab: replay.capture
    def capture(
        self,
        keys: Sequence[GraphKey],
        build: Callable[[GraphKey], Any],
        forward: Callable[[Any], torch.Tensor],
    ) -> None:
        """Record ``forward(inputs)`` for each bucket, on the inputs that ``build(key)`` makes (those of `frame`)."""
        from minisgl.engine.record import Recorder

        recorder = Recorder(self.device)
        # 1. They share memory, and no two run at once: the largest first, so that the others fit into its own.
        for key in sorted(keys, reverse=True):
            self.recordings[key] = recorder.record(forward, build(key))

    def run(self, key: GraphKey) -> torch.Tensor:
        """Replay a bucket, whose buffers hold the step's rows."""
        # 2. One launch, however many were recorded; the result stands where it stood in the recording.
        self.replays += 1
        return self.recordings[key].replay()

    # lab: end

    def close(self) -> None:
        """Drop the recordings, and the memory that they hold."""
        self.recordings.clear()


@hookimpl
def minisgl_configs() -> Iterator[tuple[str, str, type]]:
    yield "graph", "replay", Replay


class Plugin:
    """Makes the runner of one engine, and tells what it did."""

    def __init__(self) -> None:
        self.runner: ReplayRunner | None = None

    @hookimpl
    def minisgl_graph(self, config: Any, device: torch.device) -> GraphRunner | None:
        if not isinstance(config, Replay):
            return None
        self.runner = ReplayRunner(config, device)
        return self.runner

    @hookimpl
    def minisgl_metrics(self) -> str:
        if self.runner is None:
            return ""
        counts = {"replays": self.runner.replays, "padded_rows": self.runner.padded_rows}
        return "".join(f"# TYPE minisgl_graph_{n} counter\nminisgl_graph_{n}_total {c}\n" for n, c in counts.items())
