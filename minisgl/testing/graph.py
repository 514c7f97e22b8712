"""A conformance kit for graph runners: a very small engine whose results are integers, and rules for replays.

The engine's forward pass writes one number for each position into a pool of pages, and returns for each row the sum of
the numbers that the row reads. So a stale sequence length, a missing row or a page that padding overwrote changes a
sum. The kit uses only the interface `BucketRunner`, so it applies to every graph runner.
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
from minisgl.plugins.graph.replaying import BucketRunner, StaticInputs
from minisgl.plugins.graph.replaying.inputs import GraphInputBuffers

__all__ = ["RULES", "GraphConformance", "GraphFault", "GraphRig"]

RULES = {
    "buckets": "The buckets are in increasing order without duplicates, and none is larger than the largest step.",
    "pick": "A decode step gets the smallest recorded bucket that has enough rows; every other step runs eagerly.",
    "rebound": "A runner writes into the recorded buffers: it never replaces or resizes them.",
    "rows": "The buffers contain the rows of the step, unchanged and in their order.",
    "decode-rows": "Every row of a bucket is a decode row with one query, padding rows included.",
    "padding-page": "Padding rows write their KV into the scratch page only.",
    "padding-row": "A padding row is at position 0 of the scratch row of the request pool, and has sequence length 1.",
    "stale": "Rows after the rows of a step contain nothing of an earlier step: each padding row reads one position.",
    "eager": "A replay runs the recorded operations and does not call the forward pass again.",
    "capture": "Each bucket is recorded once, with the inputs that `build(key)` returned for it just before.",
    "answer": "A replay gives the result of the forward pass.",
}
"""The name of each rule, and the rule as a sentence."""


class GraphFault(AssertionError):  # noqa: N818 - named like `SimViolation`
    """A runner broke a rule. ``rule`` is a key of `RULES`; ``bucket`` is the number of rows of the bucket."""

    def __init__(self, rule: str, text: str, *, step: int | None = None, bucket: int | None = None):
        self.rule, self.text, self.step, self.bucket = rule, text, step, bucket
        found = {"step": step, "bucket": bucket}
        location = "".join(f" {name} {value}," for name, value in found.items() if value is not None)
        super().__init__(f"[{rule}]{location} {text}\n  The rule: {RULES[rule]}")


class GraphRig:
    """A graph runner in a very small engine with ``max_rows`` requests, each with ``columns`` pages of two tokens.

    The first page of request-pool row 0 is page 0. The constructor lets the runner record its buckets. All methods
    raise `GraphFault` if the runner breaks a rule.
    """

    def __init__(self, runner: BucketRunner, max_rows: int, *, columns: int = 3, device: torch.device | str = "cpu"):
        self.runner, self.device, page_size = runner, torch.device(device), 2
        pages = max_rows * columns
        self.spec = EngineSpec(page_size, pages, max_rows, max_seq_len=page_size * columns, vocab_size=1000)
        self.page_table_cpu = np.full((max_rows + 1, columns), pages, np.int32)
        self.page_table_cpu[:max_rows] = np.arange(pages).reshape(max_rows, columns)
        self.page_table = torch.tensor(self.page_table_cpu, device=self.device)
        self.pool = torch.zeros((pages + 1) * page_size, dtype=torch.float64, device=self.device)
        self.expected_pool = np.zeros(pages * page_size)
        self.seq_lens = np.zeros(max_rows, np.int32)
        self.steps = self.padded_rows = self.replays = self.forwards = 0
        self.inputs: dict[GraphKey, tuple[StaticInputs, AttnBatch]] = {}
        self.computed: list[int] = []  # for each call of the forward pass, the number of rows of its bucket
        self._last_built: Any = None
        self._first_packed: dict[GraphKey, Tensor] = {}  # bucket -> its token buffer when it was built
        self._first_batch: dict[GraphKey, AttnBatch] = {}
        self._position = torch.arange(page_size * columns, device=self.device)
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with self._compute_context():
            self.keys = list(runner.buckets(max_rows))
            self._check_buckets(max_rows)
            runner.capture(tuple(self.keys), self._build, self._forward)
            self.pool.zero_()
        for key in self.keys:
            if key not in self.inputs:
                raise GraphFault("capture", "capture() did not call build(key) for this bucket", bucket=key.rows)
        self._recorded = self.forwards

    def _check_buckets(self, max_rows: int) -> None:
        sizes = [key.rows for key in self.keys]
        if sizes != sorted(set(sizes)):
            raise GraphFault("buckets", f"the buckets have {sizes} rows, expected increasing numbers")
        if sizes and (sizes[0] < 1 or sizes[-1] > max_rows):
            raise GraphFault("buckets", f"the buckets have {sizes} rows, but a step has 1 to {max_rows} rows")

    # ---- the engine -------------------------------------------------------------------------------------

    @contextmanager
    def _compute_context(self) -> Iterator[None]:
        """Disable autograd, and on a GPU use a separate stream: CUDA cannot record the default stream."""
        with torch.inference_mode(), torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
            yield

    def _build(self, key: GraphKey) -> StaticInputs:
        if key in self.inputs:
            raise GraphFault("capture", "capture() called build(key) twice for this bucket", bucket=key.rows)
        own = getattr(self.runner, "input_buffers", None)
        args = (key, self.spec, self.page_table, self.device)
        buffers: StaticInputs = own(*args) if own is not None else GraphInputBuffers(*args)
        self._first_batch[key], self._first_packed[key] = buffers.fill(None), buffers.tokens.packed
        self._fill(key, buffers, None)
        self.inputs[key] = (buffers, self._first_batch[key])
        self._last_built = buffers
        return buffers

    def _fill(self, key: GraphKey, buffers: StaticInputs, packed: I32 | None) -> None:
        batch = buffers.fill(None if packed is None else packed.copy())
        first = self._first_batch[key]
        now = {name: getattr(batch, name) for name in ("seq_lens", "req_pool_indices", "cu_seqlens_q", "page_table")}
        then = {name: getattr(first, name) for name in now}
        now["tokens.packed"], then["tokens.packed"] = buffers.tokens.packed, self._first_packed[key]
        for name, x in now.items():
            y = then[name]
            if (x.data_ptr(), x.shape, x.stride()) != (y.data_ptr(), y.shape, y.stride()):
                text = f"{name} has another address, shape or stride than when it was recorded"
                raise GraphFault("rebound", text, step=self.steps, bucket=key.rows)
        self._check_filled(key, buffers, batch, np.empty((5, 0), np.int32) if packed is None else packed)

    def _forward(self, inputs: Any) -> Tensor:
        """Write each row's number to its KV location, and return for each row the sum of the numbers that it reads."""
        self.forwards += 1
        batch = next((batch for buffers, batch in self.inputs.values() if buffers is inputs), None)
        if batch is None:
            raise GraphFault(
                "capture", f"the forward pass got a {type(inputs).__name__} that build(key) did not return"
            )
        if inputs is not self._last_built:
            text = "the forward pass got the inputs of this bucket after build(key) was called for another bucket"
            raise GraphFault("capture", text, bucket=inputs.tokens.packed.shape[1])
        self.computed.append(inputs.tokens.packed.shape[1])
        ids, positions, out_cache_loc, req_pool_indices = inputs.tokens.packed[:4].long().unbind()
        self.pool.index_copy_(0, out_cache_loc, (ids * 31 + positions * 7 + 1).double())
        size = self.spec.page_size
        pages = self.page_table.index_select(0, req_pool_indices).long().index_select(1, self._position // size)
        numbers = self.pool.index_select(0, (pages * size + self._position % size).flatten()).view(pages.shape)
        return (numbers * (self._position < batch.seq_lens[:, None])).sum(1)

    def step(self, rows: int) -> None:
        """Run and check one decode step of ``rows`` rows, which use the request-pool rows 0, 1, ….

        A request that has reached the longest sequence starts again at position 0.
        """
        packed = self._next_rows(rows)
        with self._compute_context():
            key = self.runner.pick(rows, 1, True)
            self._check_pick(rows, key)
            if key is not None:
                self._replay(key, packed)
            else:  # no replay: write the KV that an eager step would write
                self.pool[: len(self.expected_pool)] = torch.from_numpy(self.expected_pool).to(self.device)
        self.steps += 1

    def _next_rows(self, rows: int) -> I32:
        indices = np.arange(rows, dtype=np.int32)
        self.seq_lens[indices[self.seq_lens[indices] == self.spec.max_seq_len]] = 0
        positions = self.seq_lens[indices]
        size = self.spec.page_size
        out_cache_loc = self.page_table_cpu[indices, positions // size] * size + positions % size
        ids = (indices * 13 + self.steps * 5 + 1) % self.spec.vocab_size
        self.seq_lens[indices] += 1
        self.expected_pool[out_cache_loc] = ids * 31 + positions * 7 + 1
        return np.stack((ids, positions, out_cache_loc, indices, self.seq_lens[indices])).astype(np.int32)

    def _replay(self, key: GraphKey, packed: I32) -> None:
        step, rows = self.steps, packed.shape[1]
        self._fill(key, self.inputs[key][0], packed)
        out = self.runner.run(key)
        self.replays += 1
        self.padded_rows += key.rows - rows
        if self.forwards != self._recorded:
            text = "the replay called the forward pass again"
            raise GraphFault("eager", text, step=step, bucket=key.rows)
        pool = self.pool[: len(self.expected_pool)].cpu().numpy()
        wrong = np.flatnonzero(pool != self.expected_pool)
        for row in np.flatnonzero(np.isin(packed[2], wrong))[:1].tolist():
            text = f"the KV of row {row} was not written to its KV location {packed[2, row]}"
            raise GraphFault("answer", text, step=step, bucket=key.rows)
        for location in wrong[:1].tolist():
            text = f"page {location // self.spec.page_size} was overwritten, which no row of the step writes"
            raise GraphFault("padding-page", text, step=step, bucket=key.rows)
        want = [float(self.expected_pool[self._kv_locations(row)].sum()) for row in range(rows)]
        got = out[:rows].tolist()
        for row in range(rows):
            if got[row] != want[row]:
                text = f"the result of row {row} is {got[row]:g}, expected {want[row]:g}"
                raise GraphFault("answer", text, step=step, bucket=key.rows)

    def _kv_locations(self, req_pool_idx: int) -> I32:
        positions = np.arange(self.seq_lens[req_pool_idx])
        size = self.spec.page_size
        locations: I32 = self.page_table_cpu[req_pool_idx, positions // size] * size + positions % size
        return locations

    # ---- checks ------------------------------------------------------------------------------------------

    def _check_pick(self, rows: int, key: GraphKey | None) -> None:
        want = min((k for k in self.keys if k.rows >= rows), default=None)
        if key != want:
            text = f"pick() returned {_name(key)} for a step of {rows} rows, expected {_name(want)}"
            text += f"; the recorded buckets have {[k.rows for k in self.keys]} rows"
            raise GraphFault("pick", text, step=self.steps)

    def _check_filled(self, key: GraphKey, buffers: StaticInputs, batch: AttnBatch, packed: I32) -> None:
        step, bucket, n, filled = self.steps, key.rows, packed.shape[1], buffers.tokens.packed
        if filled.shape[1] != bucket or len(batch.seq_lens) != bucket or len(batch.seq_lens_cpu) != bucket:
            text = f"the buffers have {filled.shape[1]} rows of tokens, {len(batch.seq_lens)} seq_lens and"
            text += f" {len(batch.seq_lens_cpu)} seq_lens_cpu; expected {bucket} of each"
            raise GraphFault("decode-rows", text, step=step, bucket=bucket)
        ends = batch.cu_seqlens_q_cpu.tolist()
        if batch.num_decode != bucket or ends != list(range(bucket + 1)) or batch.cu_seqlens_q.tolist() != ends:
            text = f"num_decode is {batch.num_decode} and cu_seqlens_q is {batch.cu_seqlens_q.tolist()} ({ends} on the"
            text += f" CPU); expected {bucket} decode rows with one query each, padding rows included"
            raise GraphFault("decode-rows", text, step=step, bucket=bucket)
        now = torch.cat((filled[:4], batch.seq_lens[None].to(filled.dtype))).cpu().numpy()
        names = ("input_ids", "positions", "out_cache_loc", "req_pool_indices", "seq_lens")
        for name, row in zip(names, range(5), strict=True):
            if not np.array_equal(now[row, :n], packed[row]):
                text = f"{name} are {now[row, :n].tolist()}, expected {packed[row].tolist()}"
                raise GraphFault("rows", text, step=step, bucket=bucket)
        scratch = self.spec.num_pages * self.spec.page_size
        for row in range(n, bucket):
            req_pool_idx, location = int(now[3, row]), int(now[2, row])
            if n and req_pool_idx < self.spec.max_running_requests and req_pool_idx not in packed[3]:
                text = f"padding row {row} has req_pool_idx {req_pool_idx}, which no row of this step has"
                raise GraphFault("stale", text, step=step, bucket=bucket)
            if location < scratch:
                text = f"padding row {row} writes to page {location // self.spec.page_size}, expected the scratch page"
                text += f" {self.spec.num_pages}"
                raise GraphFault("padding-page", text, step=step, bucket=bucket)
            if req_pool_idx != self.spec.max_running_requests or now[1, row] != 0:
                text = f"padding row {row} is at position {now[1, row]} of req_pool_idx {req_pool_idx}, expected"
                text += f" position 0 of req_pool_idx {self.spec.max_running_requests}"
                raise GraphFault("padding-row", text, step=step, bucket=bucket)
            if now[4, row] != 1 or batch.seq_lens_cpu[row] != 1:
                on_cpu, on_device = int(batch.seq_lens_cpu[row]), int(now[4, row])
                text = f"padding row {row} has seq_lens {on_device} and seq_lens_cpu {on_cpu}, expected 1 and 1"
                rule = "padding-row" if min(on_cpu, on_device) < 1 else "stale"  # a row of a step reads a position
                raise GraphFault(rule, text, step=step, bucket=bucket)

    def run(self, steps: Iterable[int]) -> None:
        """Run and check one decode step for each number of rows in ``steps``."""
        for rows in steps:
            self.step(rows)


def _name(key: GraphKey | None) -> str:
    return "no bucket" if key is None else f"the bucket of {key.rows} rows"


class GraphConformance:
    """The tests that every graph runner must pass.

    Subclass it in a test file, give the subclass a name that begins with ``Test``, and implement `make`::

        class TestMine(GraphConformance):
            def make(self):
                return MyRunner()
    """

    device: torch.device | str = "cpu"
    """The device of the buffers. "cuda" tests CUDA graphs."""

    def make(self) -> BucketRunner:
        """Build a new object of your graph runner."""
        raise NotImplementedError("make(self) must return a new object of the graph runner to test")

    def rig(self, max_rows: int) -> GraphRig:
        """Build a `GraphRig` with your runner, which records its buckets."""
        return GraphRig(self.make(), max_rows, device=self.device)

    def test_buckets(self) -> None:
        """Buckets are in increasing order and not larger than the largest step."""
        for max_rows in (1, 2, 7, 20):
            self.rig(max_rows)

    def test_pick(self) -> None:
        """``pick`` returns the smallest bucket that has enough rows, and replays give the right results."""
        for max_rows in (1, 5, 12):
            self.rig(max_rows).run(range(1, max_rows + 1))

    def test_eager_steps(self) -> None:
        """``pick`` returns None for steps that are not decode steps, and for steps larger than every bucket."""
        rig = self.rig(4)
        for rows, q_len, uniform in ((2, 1, False), (2, 3, True), (100_000, 1, True)):
            key = rig.runner.pick(rows, q_len, uniform)
            assert key is None, f"pick({rows}, {q_len}, {uniform}) returned {key}, expected None"

    def test_pick_without_recordings(self) -> None:
        """``pick`` returns None before ``capture`` and after ``close``."""
        key = self.make().pick(1, 1, True)
        assert key is None, f"pick(1, 1, True) before capture() returned {key}, expected None: nothing is recorded"
        rig = self.rig(3)
        rig.runner.close()
        key = rig.runner.pick(1, 1, True)
        assert key is None, f"pick(1, 1, True) after close() returned {key}, expected None"

    def test_random_steps(self) -> None:
        """Replays give the result of the forward pass, whatever the sizes of the steps before."""
        for seed in range(6):
            rng = random.Random(seed)
            max_rows = rng.randint(1, 9)
            self.rig(max_rows).run(rng.randint(1, max_rows) for _ in range(24))
