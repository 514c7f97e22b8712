"""Lab replay: Hundreds of launches become one.

Grade it:  python -m minisgl.lab test replay     (`hint replay` for a hint)
Serve it:  python -m minisgl plugins=my_replay.py graph=mine
"""

# minisgl lab replay, skeleton 2e24deb7e7 (minisgl 0.2.0)

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from minisgl.attention import AttnBatch, GraphKey
from minisgl.core import I32, EngineSpec
from minisgl.hooks import hookimpl
from minisgl.plugins.graph.replaying import BucketRunner

if TYPE_CHECKING:
    from minisgl.plugins.graph.replaying.record import Recording


@dataclass
class Mine:
    """Decode steps recorded once per bucket and replayed as one launch, on a GPU or a CPU."""

    max_rows: int = 64
    """Largest bucket of decode rows. Decode steps with more rows run operation by operation."""

    def __post_init__(self) -> None:
        if self.max_rows < 1:
            raise ValueError(f"graph.max_rows={self.max_rows} must be at least 1")

    def build(self, device: torch.device) -> MyRunner:
        return MyRunner(self, device)


class Buffers:
    """Static input buffers of one bucket; implements `minisgl.plugins.graph.replaying.StaticInputs`.

    ``packed`` is int32 [5, rows] on the device. Its five lines are: token id (or PENDING), position, out_cache_loc (KV
    location to write: page · page_size + offset), request-pool index, and sequence length (positions that the row
    reads).
    """

    def __init__(self, key: GraphKey, spec: EngineSpec, page_table: torch.Tensor, device: torch.device):
        from minisgl.engine.inputs import ModelInputs

        self.key, self.spec, self.page_table, self.device = key, spec, page_table, device
        self.packed = torch.zeros((5, key.rows), dtype=torch.int32, device=device)
        self.tokens = ModelInputs(self.packed, pending=True)
        self.cu_seqlens_q_cpu = np.arange(key.rows + 1, dtype=np.int32)  # one query per row: query r is row r's
        self.cu_seqlens_q = torch.from_numpy(self.cu_seqlens_q_cpu).to(device)

    def padding(self) -> I32:
        """Return the column of ``packed`` for a padding row, which belongs to no request: int32 [5]."""
        # TODO replay.buffers
        # 1. Each replay writes the KV of padding rows too. Any page below num_pages, page 0 included, may belong to a
        #    request or to the prefix cache; page num_pages is the scratch page.
        # 2. A padding row is computed like a decode row: position 0 of the scratch request-pool row, sequence length 1.
        raise NotImplementedError

    def fill(self, packed: I32 | None) -> AttnBatch:
        """Copy the rows of a step, int32 [5, n], into the buffers and make the remaining rows padding.

        n is at most the number of rows of the bucket. None: all rows are padding. Returns the batch for attention: all
        rows of the bucket, also those of padding, are decode rows. The batch's tensors are views of ``self.packed``, or
        other tensors of this object. ``seq_lens_cpu`` is an int32 array of numpy, and may be a new one in each call.
        Keep no view of the argument, because its caller may change it.
        """
        # TODO replay.buffers
        # 3. Write every row each time: after a larger step, the rows behind a smaller step would still hold its data.
        # 4. Copy into the buffer that was recorded: a replay would never read a new tensor. The host must not wait for
        #    the device: pass ``non_blocking=True`` to `copy_`. An assignment (``x[:] = y``) of a host tensor waits. The
        #    source may be in ordinary memory. Read nothing back.
        raise NotImplementedError


class MyRunner(BucketRunner):
    """Graph runner of graph=replay; `minisgl.plugins.graph.replaying.BucketRunner` documents the methods.

    ``replays`` counts replays; ``padded_rows`` counts the padding rows that were computed.
    """

    def __init__(self, config: Mine, device: torch.device):
        self.config, self.device = config, device
        self.recordings: dict[GraphKey, Recording] = {}
        self.replays = self.padded_rows = 0

    def input_buffers(self, key: GraphKey, spec: EngineSpec, page_table: torch.Tensor, device: torch.device) -> Buffers:
        """Allocate the input buffers of a bucket. ``page_table`` is [max_running_requests + 1, columns]."""
        return Buffers(key, spec, page_table, device)

    def buckets(self, max_rows: int) -> list[GraphKey]:
        """Return the buckets to record for steps of at most ``max_rows`` rows."""
        return [GraphKey(size) for size in self.sizes(min(max_rows, self.config.max_rows))]

    def pick(self, rows: int, q_len: int, uniform: bool) -> GraphKey | None:
        """Return the bucket for a step. None for a step that is too large or has a prompt: it runs eagerly."""
        key = self.bucket(rows) if uniform and q_len == 1 else None
        if key is not None:
            self.padded_rows += key.rows - rows
        return key

    def sizes(self, max_rows: int) -> list[int]:
        """Return the number of rows of each bucket, in increasing order. ``max_rows`` is at least 1."""
        # TODO replay.buckets
        # 1. Each recording costs memory and start-up time: use few sizes. No step may be padded to more than twice its
        #    rows. The gates accept 8 sizes, or half of ``max_rows`` if that is more.
        # 2. The largest step must fit too.
        raise NotImplementedError

    def bucket(self, rows: int) -> GraphKey | None:
        """Return the smallest recorded bucket that holds ``rows`` rows, or None if there is none.

        Before `capture` and after `close`, there is none.
        """
        # TODO replay.buckets
        # 3. A padding row costs as much time as any other row.
        raise NotImplementedError

    def capture(
        self,
        keys: Sequence[GraphKey],
        build: Callable[[GraphKey], Any],
        forward: Callable[[Any], torch.Tensor],
    ) -> None:
        """Record ``forward(build(key))`` for each bucket.

        ``build`` calls `input_buffers`, and then ``fill(None)`` of the buffers. It also prepares attention for the
        bucket: record each bucket before the next call of ``build``. The first of ``keys`` are the buckets that
        `buckets` returned, in their order. The others have ``shared_prefix``, which makes them larger than the key with
        as many rows. Record them too: `run` gets them, but `bucket` never returns one. ``keys`` must not change.
        """
        # TODO replay.capture
        # 1. All recordings share memory, because only one is replayed at a time. Record the largest bucket first: the
        #    smaller ones then reuse its memory.
        raise NotImplementedError

    def run(self, key: GraphKey) -> torch.Tensor:
        """Replay a bucket, whose buffers hold the step's rows, and return the logits.

        Add 1 to ``replays``, which /metrics shows. Only calls of this method count.
        """
        # TODO replay.capture
        # 2. A replay is one launch, however many launches were recorded. The result is always the same output tensor.
        raise NotImplementedError

    def close(self) -> None:
        """Drop the recordings and their memory: keep no reference to a recording or to its output."""
        self.recordings.clear()

    def metrics(self) -> str:
        """Return the counts in Prometheus' text format."""
        counts = {"replays": self.replays, "padded_rows": self.padded_rows}
        return "".join(f"# TYPE minisgl_graph_{n} counter\nminisgl_graph_{n}_total {c}\n" for n, c in counts.items())


@hookimpl
def minisgl_configs() -> Iterator[tuple[str, str, type]]:
    yield "graph", "mine", Mine
