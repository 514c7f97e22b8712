"""A kit to test graph runners with: a tiny engine whose answers are whole numbers, and what a replay must not do.

Its forward pass writes one number a position into a pool of pages and adds up what each row sees, so a stale length, a
forgotten row or a page that padding overwrote shows in the sum. Knows `minisgl.engine.graph` and no runner.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minisgl.attention import AttnBatch, GraphKey
from minisgl.core import I32, EngineSpec
from minisgl.engine.graph import GraphRunner, StaticInputs
from minisgl.engine.inputs import GraphInputBuffers

__all__ = ["RULES", "GraphConformance", "GraphFault", "GraphRig"]

RULES = {
    "buckets": "Buckets rise, each once, and none is above the rows that there can be.",
    "pick": "A step of decode rows gets the smallest recorded bucket that holds it; every other step runs eagerly.",
    "rebound": "The buffers that were recorded are written into: never replaced, never resized.",
    "rows": "A step's rows stand in the buffers as they were given.",
    "padding-page": "Padding writes its KV into the scratch page and nowhere else.",
    "padding-row": "A row of padding is a decode row at position 0 of the scratch slot.",
    "stale": "Nothing of an earlier step is left in the rows behind a smaller one: padding reads one position.",
    "eager": "A replay runs what was recorded; it does not call the forward pass again.",
    "capture": "Each bucket is recorded once, on the inputs that were built for it.",
    "answer": "A replay gives what the forward pass gives.",
}


class GraphFault(AssertionError):  # noqa: N818 - as the simulated engine's violations are called
    """A runner broke a rule (a key of `RULES`), in that step of the rig, in the bucket of so many rows."""

    def __init__(self, rule: str, text: str, *, step: int | None = None, bucket: int | None = None):
        self.rule, self.text, self.step, self.bucket = rule, text, step, bucket
        places = {"step": step, "bucket": bucket}
        where = "".join(f" {name} {value}," for name, value in places.items() if value is not None)
        super().__init__(f"[{rule}]{where} {text}\n  The rule: {RULES[rule]}")


class GraphRig:
    """A runner in a tiny engine with ``max_rows`` slots, each with ``columns`` pages of its own. Slot 0 begins in page
    0. Makes the runner record at once. Raises `GraphFault`."""

    def __init__(self, runner: GraphRunner, max_rows: int, *, columns: int = 3, device: torch.device | str = "cpu"):
        self.runner, self.device, page_size = runner, torch.device(device), 2
        pages = max_rows * columns
        self.spec = EngineSpec(page_size, pages, max_rows, max_seq_len=page_size * columns, vocab_size=1000)
        self.table_host = np.full((max_rows + 1, columns), pages, np.int32)
        self.table_host[:max_rows] = np.arange(pages).reshape(max_rows, columns)
        self.table = torch.tensor(self.table_host, device=self.device)
        self.pool = torch.zeros((pages + 1) * page_size, dtype=torch.float64, device=self.device)
        self.truth = np.zeros(pages * page_size)
        self.lengths = np.zeros(max_rows, np.int32)
        self.steps = self.padded_rows = self.replays = self.forwards = 0
        self.frames: dict[GraphKey, tuple[StaticInputs, AttnBatch]] = {}
        self._held: dict[GraphKey, Tensor] = {}  # each bucket's tokens and batch, as they were first
        self._planned: dict[GraphKey, AttnBatch] = {}
        self._position = torch.arange(page_size * columns, device=self.device)
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with self._computing():
            self.keys = list(runner.buckets(max_rows))
            self._check_buckets(max_rows)
            runner.capture(self.keys, self._build, self._forward)
            self.pool.zero_()
        for key in self.keys:
            if key not in self.frames:
                raise GraphFault("capture", "its inputs were never built", bucket=key.rows)
        self._recorded = self.forwards

    def _check_buckets(self, max_rows: int) -> None:
        sizes = [key.rows for key in self.keys]
        if sizes != sorted(set(sizes)):
            raise GraphFault("buckets", f"the buckets are {sizes}")
        if sizes and (sizes[0] < 1 or sizes[-1] > max_rows):
            raise GraphFault("buckets", f"the buckets are {sizes}; a step has 1 to {max_rows} rows")

    # ---- what an engine does ----------------------------------------------------------------------------

    @contextmanager
    def _computing(self) -> Iterator[None]:
        """As an engine does: without autograd, and on a GPU on a stream of its own (CUDA records no other)."""
        with torch.inference_mode(), torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
            yield

    def _build(self, key: GraphKey) -> StaticInputs:
        if key in self.frames:
            raise GraphFault("capture", "its inputs were built twice", bucket=key.rows)
        own = getattr(self.runner, "input_buffers", None)
        args = (key, self.spec, self.table, self.device)
        frame: StaticInputs = own(*args) if own is not None else GraphInputBuffers(*args)
        self._planned[key], self._held[key] = frame.fill(None), frame.tokens.packed
        self._fill(key, frame, None)
        self.frames[key] = (frame, self._planned[key])
        return frame

    def _fill(self, key: GraphKey, frame: StaticInputs, packed: I32 | None) -> None:
        batch = frame.fill(None if packed is None else packed.copy())
        first = self._planned[key]
        now = {name: getattr(batch, name) for name in ("seq_lens", "slots", "cu_seqlens_q", "table")}
        then = {name: getattr(first, name) for name in now}
        now["tokens"], then["tokens"] = frame.tokens.packed, self._held[key]
        for name, x in now.items():
            y = then[name]
            if (x.data_ptr(), x.shape, x.stride()) != (y.data_ptr(), y.shape, y.stride()):
                text = f"{name} is another tensor than before"
                raise GraphFault("rebound", text, step=self.steps, bucket=key.rows)
        self._check_filled(key, frame, batch, np.empty((5, 0), np.int32) if packed is None else packed)

    def _forward(self, inputs: Any) -> Tensor:
        """Write each row's number to its place, then add up what it sees."""
        self.forwards += 1
        batch = next((batch for frame, batch in self.frames.values() if frame is inputs), None)
        if batch is None:
            raise GraphFault(
                "capture", f"the forward pass got {type(inputs).__name__}, which build(key) did not return"
            )
        ids, positions, where, slots = inputs.tokens.packed[:4].long().unbind()
        self.pool.index_copy_(0, where, (ids * 31 + positions * 7 + 1).double())
        size = self.spec.page_size
        pages = self.table.index_select(0, slots).long().index_select(1, self._position // size)
        numbers = self.pool.index_select(0, (pages * size + self._position % size).flatten()).view(pages.shape)
        return (numbers * (self._position < batch.seq_lens[:, None])).sum(1)

    def step(self, rows: int) -> None:
        """One decode step of so many rows, in slots 0, 1, …; a slot that is full begins again. Checks everything."""
        packed = self._next_rows(rows)
        with self._computing():
            key = self.runner.pick(rows, 1, True)
            self._check_pick(rows, key)
            if key is not None:
                self._replay(key, packed)
            else:  # as a step that runs operation by operation would
                self.pool[: len(self.truth)] = torch.from_numpy(self.truth).to(self.device)
        self.steps += 1

    def _next_rows(self, rows: int) -> I32:
        slots = np.arange(rows, dtype=np.int32)
        self.lengths[slots[self.lengths[slots] == self.spec.max_seq_len]] = 0
        positions = self.lengths[slots]
        size = self.spec.page_size
        where = self.table_host[slots, positions // size] * size + positions % size
        ids = (slots * 13 + self.steps * 5 + 1) % self.spec.vocab_size
        self.lengths[slots] += 1
        self.truth[where] = ids * 31 + positions * 7 + 1
        return np.stack((ids, positions, where, slots, self.lengths[slots])).astype(np.int32)

    def _replay(self, key: GraphKey, packed: I32) -> None:
        step, rows = self.steps, packed.shape[1]
        self._fill(key, self.frames[key][0], packed)
        out = self.runner.run(key)
        self.replays += 1
        self.padded_rows += key.rows - rows
        if self.forwards != self._recorded:
            raise GraphFault("eager", "the forward pass was called again", step=step, bucket=key.rows)
        pool = self.pool[: len(self.truth)].cpu().numpy()
        wrong = np.flatnonzero(pool != self.truth)
        for row in np.flatnonzero(np.isin(packed[2], wrong))[:1].tolist():
            raise GraphFault("answer", f"row {row}'s KV is not in its place", step=step, bucket=key.rows)
        for place in wrong[:1].tolist():
            page = place // self.spec.page_size
            raise GraphFault("padding-page", f"page {page} was overwritten", step=step, bucket=key.rows)
        want = [float(self.truth[self._places(slot)].sum()) for slot in range(rows)]
        got = out[:rows].tolist()
        for row in range(rows):
            if got[row] != want[row]:
                text = f"row {row} sums up to {got[row]:g}, and should to {want[row]:g}"
                raise GraphFault("answer", text, step=step, bucket=key.rows)

    def _places(self, slot: int) -> I32:
        positions = np.arange(self.lengths[slot])
        size = self.spec.page_size
        places: I32 = self.table_host[slot, positions // size] * size + positions % size
        return places

    # ---- what is checked ---------------------------------------------------------------------------------

    def _check_pick(self, rows: int, key: GraphKey | None) -> None:
        want = min((k for k in self.keys if k.rows >= rows), default=None)
        if key != want:
            text = f"a step of {rows} rows got {_name(key)}; recorded are {[k.rows for k in self.keys]}"
            raise GraphFault("pick", text, step=self.steps)

    def _check_filled(self, key: GraphKey, frame: StaticInputs, batch: AttnBatch, packed: I32) -> None:
        step, bucket, n, held = self.steps, key.rows, packed.shape[1], frame.tokens.packed
        if held.shape[1] != bucket or len(batch.seq_lens) != bucket or len(batch.seq_lens_cpu) != bucket:
            raise GraphFault("rows", f"the buffers have {held.shape[1]} rows", step=step, bucket=bucket)
        ends = batch.cu_seqlens_q_cpu.tolist()
        if batch.num_decode != bucket or ends != list(range(bucket + 1)) or batch.cu_seqlens_q.tolist() != ends:
            text = f"{batch.num_decode} rows are to be planned, with queries {ends}; padding is planned too"
            raise GraphFault("rows", text, step=step, bucket=bucket)
        now = torch.cat((held[:4], batch.seq_lens[None].to(held.dtype))).cpu().numpy()
        for name, row in zip(("ids", "positions", "places", "slots", "lengths"), range(5), strict=True):
            if not np.array_equal(now[row, :n], packed[row]):
                text = f"{name} are {now[row, :n].tolist()}, and should be {packed[row].tolist()}"
                raise GraphFault("rows", text, step=step, bucket=bucket)
        scratch = self.spec.num_pages * self.spec.page_size
        for row in range(n, bucket):
            slot, place = int(now[3, row]), int(now[2, row])
            if n and slot < self.spec.max_running_requests and slot not in packed[3]:
                text = f"padding row {row} is a row of slot {slot}, which is not in this step"
                raise GraphFault("stale", text, step=step, bucket=bucket)
            if place < scratch:
                text = f"padding row {row} writes to page {place // self.spec.page_size}"
                raise GraphFault("padding-page", text, step=step, bucket=bucket)
            if slot != self.spec.max_running_requests or now[1, row] != 0:
                text = f"padding row {row} is position {now[1, row]} of slot {slot}"
                raise GraphFault("padding-row", text, step=step, bucket=bucket)
            if now[4, row] != 1 or batch.seq_lens_cpu[row] != 1:
                told, read = int(batch.seq_lens_cpu[row]), int(now[4, row])
                text = f"padding row {row} reads {read} positions, and {told} by seq_lens_cpu"
                raise GraphFault("stale", text, step=step, bucket=bucket)

    def run(self, steps: Iterable[int]) -> None:
        """Steps of so many rows each."""
        for rows in steps:
            self.step(rows)


def _name(key: GraphKey | None) -> str:
    return "no bucket" if key is None else f"the bucket of {key.rows}"


class GraphConformance:
    """What every graph runner must pass::

    class TestMine(GraphConformance):
        def make(self):
            return MyRunner()
    """

    device: torch.device | str = "cpu"

    def make(self) -> GraphRunner:
        """A new runner."""
        raise NotImplementedError("make(self) returns the graph runner to test")

    def rig(self, max_rows: int) -> GraphRig:
        return GraphRig(self.make(), max_rows, device=self.device)

    def test_buckets_rise_and_stay_within_the_rows_there_can_be(self) -> None:
        for max_rows in (1, 2, 7, 20):
            self.rig(max_rows)

    def test_every_step_gets_the_smallest_bucket_that_holds_it(self) -> None:
        for max_rows in (1, 5, 12):
            self.rig(max_rows).run(range(1, max_rows + 1))

    def test_steps_with_prompts_and_steps_that_are_too_large_run_eagerly(self) -> None:
        rig = self.rig(4)
        for rows, q_len, uniform in ((2, 1, False), (2, 3, True), (100_000, 1, True)):
            assert rig.runner.pick(rows, q_len, uniform) is None, f"pick({rows}, {q_len}, {uniform}) is no decode step"

    def test_nothing_is_picked_before_it_was_recorded_or_after_close(self) -> None:
        assert self.make().pick(1, 1, True) is None, "nothing was recorded yet"
        rig = self.rig(3)
        rig.runner.close()
        assert rig.runner.pick(1, 1, True) is None, "the recordings were dropped"

    def test_replays_give_what_the_forward_pass_gives_in_any_order_of_sizes(self) -> None:
        for seed in range(6):
            rng = random.Random(seed)
            max_rows = rng.randint(1, 9)
            self.rig(max_rows).run(rng.randint(1, max_rows) for _ in range(24))
