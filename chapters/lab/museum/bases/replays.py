"""A graph runner: decode steps are recorded once per bucket, and replayed. A bucket has its rows on the host, too."""

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

IDS, POSITIONS, LOCATIONS, REQUESTS, LENGTHS = range(5)
"""The lines of the rows of a step."""


@dataclass
class Replays:
    """Decode steps in recorded buckets, whose sizes double."""

    def build(self, device: torch.device) -> Runner:
        return Runner(device)


class Rows:
    """The input buffers of one bucket, on the device and on the host."""

    def __init__(self, key: GraphKey, spec: EngineSpec, page_table: torch.Tensor, device: torch.device):
        from minisgl.engine.inputs import ModelInputs

        self.key, self.page_table = key, page_table
        self.scratch_row, self.scratch = spec.max_running_requests, spec.num_pages * spec.page_size
        self.host = np.zeros((5, key.rows), np.int32)
        self.host[LOCATIONS] = self.scratch
        self.packed = torch.zeros((5, key.rows), dtype=torch.int32, device=device)
        self.tokens = ModelInputs(self.packed, pending=True)
        self.cu_seqlens_q_cpu = np.arange(key.rows + 1, dtype=np.int32)
        self.cu_seqlens_q = torch.from_numpy(self.cu_seqlens_q_cpu).to(device)

    def fill(self, packed: I32 | None) -> AttnBatch:
        """Copy the rows of a step, int32 [5, n], to the device. The other rows of the bucket are padding."""
        rows = 0 if packed is None else packed.shape[1]
        if packed is not None:
            self.host[:, :rows] = packed
        self._pad(rows)
        self.packed.copy_(torch.from_numpy(self.host), non_blocking=True)
        lengths = self.host[LENGTHS].copy()
        on_device = self.cu_seqlens_q, self.packed[LENGTHS], self.packed[REQUESTS], self.page_table
        return AttnBatch(self.key.rows, self.cu_seqlens_q_cpu, lengths, *on_device, self.key)

    def _pad(self, first: int) -> None:
        """Turn the rows from ``first`` on into padding: position 0 of the scratch row of the request pool."""
        self.host[IDS, first:] = 0
        self.host[POSITIONS, first:] = 0
        self.host[LOCATIONS, first:] = self.scratch
        self.host[REQUESTS, first:] = self.scratch_row
        self.host[LENGTHS, first:] = 1


class Runner(BucketRunner):
    """Records the buckets, and replays them."""

    def __init__(self, device: torch.device):
        self.device = device
        self.recordings: dict[GraphKey, Recording] = {}

    def input_buffers(self, key: GraphKey, spec: EngineSpec, page_table: torch.Tensor, device: torch.device) -> Rows:
        """Allocate the input buffers of a bucket."""
        return Rows(key, spec, page_table, device)

    def buckets(self, max_rows: int) -> list[GraphKey]:
        """Return the buckets: the powers of two below ``max_rows``, and ``max_rows``."""
        return [GraphKey(size) for size in (*(1 << i for i in range((max_rows - 1).bit_length())), max_rows)]

    def pick(self, rows: int, q_len: int, uniform: bool) -> GraphKey | None:
        """Return the smallest bucket that holds a decode step. None: the step runs eagerly."""
        fits = [key for key in self.recordings if key.rows >= rows]
        return min(fits, default=None) if uniform and q_len == 1 else None

    def capture(
        self,
        keys: Sequence[GraphKey],
        build: Callable[[GraphKey], Any],
        forward: Callable[[Any], torch.Tensor],
    ) -> None:
        """Record each bucket, the largest first."""
        from minisgl.plugins.graph.replaying.record import Recorder

        recorder = Recorder(self.device)
        for key in sorted(keys, reverse=True):
            self.recordings[key] = recorder.record(forward, build(key))

    def run(self, key: GraphKey) -> torch.Tensor:
        """Replay a bucket, whose buffers hold the rows of the step."""
        return self.recordings[key].replay()

    def close(self) -> None:
        """Drop the recordings."""
        self.recordings.clear()


@hookimpl
def minisgl_configs() -> Iterator[tuple[str, str, type]]:
    """Register the options of this plugin."""
    yield "graph", "museum", Replays
