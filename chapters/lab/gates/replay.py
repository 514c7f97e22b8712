"""Gates of lab `replay`: the student's buffers, buckets and recordings in a tiny engine, `minisgl.testing.graph`.

The sums that this engine computes show a stale row, and a page that a row of padding overwrote. Each part is graded
with the grader's own code in place of the other parts.
"""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import fields
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from minisgl.attention import GraphKey
from minisgl.chapters.lab.grader.conformance import conformance, greedy
from minisgl.chapters.lab.grader.decode_sizes import FEW, MANY, MOST_ROWS, STEPS, padding
from minisgl.chapters.lab.grader.gate import Broken, Gate, Invalid, Stretch, Student
from minisgl.chapters.lab.grader.search import search
from minisgl.chapters.lab.grader.server_gate import facts
from minisgl.chapters.lab.grader.torch_operations import DeviceReads
from minisgl.chapters.lab.grader.two_devices import TwoDevices
from minisgl.core import PENDING, EngineSpec, Step
from minisgl.plugins.graph.replaying import BucketRunner, StaticInputs
from minisgl.plugins.graph.replaying.record import Recorder, Recording
from minisgl.plugins.graph.replaying.simulated_graph import GraphViolation
from minisgl.testing.graph import RULES, GraphFault, GraphRig

CPU = torch.device("cpu")
SERVER = ["attention=torch", "max_running_requests=12"]
"""Options of the engine and of the server: attention that can be recorded on a CPU, and few rows, so few buckets."""


class Counted:
    """A recording that adds each of its launches to the list ``launches``."""

    def __init__(self, recording: Recording, launches: list[Recording]):
        self.out, self._recording, self._launches = recording.out, recording, launches

    def replay(self) -> Tensor:
        """Replay the recording and count the launch."""
        self._launches.append(self._recording)
        return self._recording.replay()


class Plain(BucketRunner):
    """A correct graph runner with one bucket for each of ``sizes``. A gate replaces some of its methods."""

    def __init__(self, sizes: Sequence[int]):
        self.recordings: dict[GraphKey, Recording] = {}
        self._sizes = sizes

    def buckets(self, max_rows: int) -> Sequence[GraphKey]:
        """Return one bucket for each size."""
        return [GraphKey(size) for size in self._sizes]

    def capture(
        self,
        keys: Sequence[GraphKey],
        build: Callable[[GraphKey], StaticInputs],
        forward: Callable[[Any], Tensor],
    ) -> None:
        """Record each bucket."""
        recorder = Recorder(CPU)
        for key in keys:
            self.recordings[key] = recorder.record(forward, build(key))

    def pick(self, rows: int, q_len: int, uniform: bool) -> GraphKey | None:
        """Return the smallest bucket that holds a decode step of ``rows`` rows, or None."""
        fits = [key for key in self.recordings if key.rows >= rows]
        return min(fits, default=None) if uniform and q_len == 1 else None

    def run(self, key: GraphKey) -> Tensor:
        """Replay the recording of a bucket."""
        return self.recordings[key].replay()

    def close(self) -> None:
        """Release the recordings."""
        self.recordings.clear()


def runner_of(student: Student) -> Any:
    """Return the student's graph runner."""
    return student.make(device=CPU)


def make(rng: random.Random, size: int) -> dict[str, Any]:
    """Return a random sequence of decode steps: the largest number of rows, and the number of rows of each step."""
    most = min(1 + size // 2, 9)
    steps = [most, most, *(rng.randint(1, most) for _ in range(min(2 + size, 16)))]
    return {"slots": most, "steps": steps}


def draw(workload: dict[str, Any]) -> str:
    """Describe the workload in one line."""
    steps = ", ".join(map(str, workload["steps"]))
    running = f"max_running_requests {workload['slots']}"
    return f"{running}; " + (f"decode steps of {steps} rows" if steps else "recording only, no step")


def play(runner: Any, workload: dict[str, Any]) -> GraphRig:
    """Record the buckets and run the workload's steps on the tiny engine. Return the engine.

    Raise `Broken` at the first error, and `Invalid` if the workload is meaningless.
    """
    slots, steps = workload["slots"], workload["steps"]
    if slots < 1 or not all(1 <= rows <= slots for rows in steps):
        raise Invalid
    try:
        rig = GraphRig(runner, slots)
        rig.run(steps)
    except GraphFault as fault:
        where = f" (bucket of {fault.bucket} rows)" if fault.bucket else ""
        seen = f"{sentence(fault.text)}{where}."
        raise Broken(fault.rule, RULES[fault.rule], seen, step=fault.step) from fault
    except GraphViolation as fault:
        cause = "rebound" if fault.rule == "static-buffer" else "capture"
        raise Broken(cause, RULES[cause], fault.text) from fault
    return rig


def sentence(text: str) -> str:
    """Return ``text`` with a capital letter; a name of the code at its beginning is quoted instead."""
    first, _, rest = text.partition(" ")
    return f"`{first}` {rest}" if set("_(.") & set(first) else f"{text[:1].upper()}{text[1:]}"


def some(sizes: Sequence[int]) -> str:
    """Return the sizes as text: all of up to 12, else the first and the last ones and their number."""
    if len(sizes) <= 12:
        return str(list(sizes))
    ends = [*map(str, sizes[:8]), "…", *map(str, sizes[-3:])]
    return f"[{', '.join(ends)}], {len(sizes)} in all"


def check_no_wait(reads: DeviceReads, what: str) -> None:
    """Raise `Broken` if the host has read a tensor of the device."""
    if reads.name:
        seen = f"{what} calls `{reads.name}` on a tensor of the device. On a GPU the host would wait in every step."
        raise Broken("waits", "The host launches a step without waiting for the device.", seen)


# ---- the parts ----------------------------------------------------------------------------------------------


def run_buffers(student: Student, workload: dict[str, Any]) -> None:
    """Grade the student's buffers, with the grader's buckets and recordings."""
    runner, plain = runner_of(student), Plain([workload["slots"]] if workload["slots"] else [])
    if not hasattr(runner, "input_buffers"):
        seen = "The runner has no method `input_buffers`."
        raise Broken("capture", "The runner builds its own input buffers.", seen)
    plain.input_buffers = runner.input_buffers  # type: ignore[attr-defined]
    try:
        play(plain, workload)
        check_large_numbers(runner)
        check_many_rows(runner)
    except Broken as fault:
        if fault.cause in ("padding-page", "padding-row", "stale") and padding_is_right(runner):
            fault.seen += " `padding()` returns the right column, but `fill` does not write it into each padding row."
        raise


def padding_is_right(runner: Any) -> bool:
    """Return whether the method `padding` of the skeleton's buffers returns the right column."""
    spec = EngineSpec(3, 7, 5, 60, 1000)
    buffers = runner.input_buffers(GraphKey(2), spec, torch.zeros((6, 20), dtype=torch.int32), CPU)
    column = buffers.padding().tolist() if hasattr(buffers, "padding") else []
    return column[1:] == [0, 21, 5, 1] and PENDING <= column[0] < spec.vocab_size


def fill(buffers: Any, key: GraphKey, spec: EngineSpec, devices: TwoDevices, rows: np.ndarray[Any, Any] | None) -> None:
    """Fill buffers with the rows of a step, and check each number of all rows. Raise `Broken` for a wrong one.

    ``devices`` followed the making of the buffers.
    """
    try:
        check_filled(buffers, key, spec, devices, rows)
    except Broken as fault:
        given = "None" if rows is None else f"the rows {rows.T.tolist()}" if rows.size < 30 else "many rows"
        fault.show = f"`fill` alone: a bucket of {key.rows} rows gets {given}"
        raise


def check_filled(
    buffers: Any, key: GraphKey, spec: EngineSpec, devices: TwoDevices, rows: np.ndarray[Any, Any] | None
) -> None:
    """Fill buffers and check each number of all rows, and the batch. Raise `Broken` for a wrong one."""
    given, table = None if rows is None else rows.copy(), devices.given[0]
    with DeviceReads([buffers.tokens.packed, *devices.tensors()]) as reads:
        batch = buffers.fill(given)
    n = 0 if rows is None else rows.shape[1]
    if given is not None and rows is not None and not np.array_equal(given, rows):
        promise = "`fill` reads the rows of the step, and changes none of the caller's arrays."
        raise Broken("changes", promise, "The array of the step's rows was another one after `fill`.")
    where = f"A bucket of {key.rows} rows was filled with {'None' if rows is None else f'a step of {n} rows'}."
    want = np.empty((5, key.rows), np.int64)
    want[:] = np.array([0, 0, spec.num_pages * spec.page_size, spec.max_running_requests, 1])[:, None]
    if rows is not None:
        want[:, :n] = rows
    packed = buffers.tokens.packed.cpu().numpy()
    names = ("token id", "position", "KV location", "request-pool index", "sequence length")
    for line, name in enumerate(names):
        for row in np.flatnonzero(packed[line] != want[line])[:1].tolist():
            if row >= n and line == 0:  # the token id of a row of padding may be any of the vocabulary
                valid = {PENDING, *range(spec.vocab_size)}
                if unknown := sorted(set(packed[0, n:].tolist()) - valid):
                    seen = f"{where} A padding row has the token id {unknown[0]}; vocab_size is {spec.vocab_size}."
                    raise Broken("padding-row", "The token id of a padding row is one of the vocabulary.", seen)
                continue
            right, got = int(want[line, row]), int(packed[line, row])
            pending = " (PENDING)" * (right == PENDING)
            seen = f"{where} The {name} of row {row} is {right}{pending}; the buffer holds {got}."
            if row >= n and line == 4 and packed[4, row] < 1:
                raise Broken("padding-row", RULES["padding-row"], seen)
            if row >= n and rows is not None and packed[2, row] != want[2, row]:
                raise Broken("padding-page", RULES["padding-page"], seen)
            if row >= n:
                raise Broken("stale", "All rows behind the rows of the step are padding, in each call of `fill`.", seen)
            raise Broken("numbers", "The buffers hold the step's rows as they are, in int32.", seen)
    if given is not None:
        given[:] = 77
    if not np.array_equal(batch.seq_lens_cpu, want[4]):
        seen = f"{where} `seq_lens_cpu` is {batch.seq_lens_cpu.tolist()[:8]}; it should be {want[4].tolist()[:8]}."
        if len(batch.seq_lens_cpu) != key.rows:
            raise Broken("decode-rows", RULES["decode-rows"], seen)
        if min(batch.seq_lens_cpu[n:], default=1) < 1:
            raise Broken("padding-row", RULES["padding-row"], seen)
        if given is not None and bool((batch.seq_lens_cpu[:n] == 77).all()):
            seen = "After the caller had written other numbers into its array, `seq_lens_cpu` had them too."
            raise Broken(
                "changes", "`fill` copies the rows of the step, and keeps no view of the caller's array.", seen
            )
        raise Broken("stale", "All rows behind the rows of the step are padding, in each call of `fill`.", seen)
    for name in ("seq_lens_cpu", "cu_seqlens_q_cpu"):
        array = getattr(batch, name)
        if not isinstance(array, np.ndarray) or array.dtype != np.int32:
            kind = f"an array of {array.dtype}" if isinstance(array, np.ndarray) else f"a {type(array).__name__}"
            seen = f"{where} `{name}` is {kind}."
            raise Broken("dtype", "The batch's arrays on the CPU are int32 arrays of numpy.", seen)
    if batch.page_table.data_ptr() != table.data_ptr():
        seen = "The batch has a copy of the page table: it does not get the pages that are allocated later."
        raise Broken("rebound", RULES["rebound"], seen)
    if batch.page_table.shape != table.shape or batch.page_table.stride() != table.stride():
        seen = f"The batch has {list(batch.page_table.shape)} entries of the page table, which has {list(table.shape)}."
        raise Broken("rebound", "The batch has the whole page table, with the scratch row.", seen)
    for name in ("cu_seqlens_q", "seq_lens", "req_pool_indices"):
        tensor = getattr(batch, name)
        if tensor.dtype != torch.int32:
            raise Broken("dtype", "The batch's tensors are int32.", f"{where} `{name}` is {tensor.dtype}.")
        if devices.on_host(tensor):
            seen = f"{where} `{name}` is in the host's memory. Attention reads it on the device."
            raise Broken("device", "The batch's tensors are on the device of the buffers.", seen)
    if batch.graph_key != key:
        seen = f"{where} `graph_key` of its batch is {batch.graph_key}; it should be {key}."
        raise Broken("key", "The batch names the bucket whose buffers its tensors are.", seen)
    check_no_wait(reads, "`fill`")


def check_large_numbers(runner: Any) -> None:
    """Check that the buffers of a bucket of 4 rows hold numbers of any size, and tokens that are still on the device.

    The numbers are above 2^24, the largest that every 32-bit floating-point number below it holds exactly. After the
    step, all rows become padding again.
    """
    spec = EngineSpec(3, 2**24 + 1, 8, 2**26, 1000)
    table = torch.full((9, 2), spec.num_pages, dtype=torch.int32)
    key = GraphKey(4)
    devices = TwoDevices([table])
    with devices.follow():
        buffers = runner.input_buffers(key, spec, table, CPU)
    rows = np.array([[PENDING, 7, 999, 0], [2**24 + 1, 0, 3, 0], [2**25 + 3, 2**24 + 5, 1, 0], [7, 0, 3, 5],
                     [2**24 + 2, 1, 4, 1]], np.int32)  # fmt: skip
    for step in (rows[:, :3], None, rows, rows[:, :0], rows[:, ::-1], rows[:, 3:], None):
        fill(buffers, key, spec, devices, step)
    first = buffers.fill(rows.copy())
    runner.input_buffers(key, spec, table, CPU).fill(None)
    if not np.array_equal(first.seq_lens_cpu, rows[4]):
        seen = "Other buffers of as many rows were filled, and `seq_lens_cpu` of the first batch changed."
        raise Broken("shared", "Each engine has its own runner, with its own buffers and recordings.", seen)
    for step in (rows[:, :3], None, rows):
        with devices.watch():
            buffers.fill(None if step is None else step.copy())
        if devices.waits:
            seen = f"`fill` copies from the host with `{devices.waits}` and without `non_blocking=True`."
            raise Broken("blocks", "The host launches a step without waiting for the device.", seen)


def check_many_rows(runner: Any) -> None:
    """Check a bucket with more rows than a constant in the code may allow."""
    spec, key = EngineSpec(3, 5000, 700, 600, 1000), GraphKey(600)
    table = torch.full((701, 200), spec.num_pages, dtype=torch.int32)
    devices = TwoDevices([table])
    with devices.follow():
        buffers = runner.input_buffers(key, spec, table, CPU)
    rows = np.arange(1, 3001, dtype=np.int32).reshape(5, 600)
    for n in (600, 1, 300, 599, 600):
        fill(buffers, key, spec, devices, rows[:, :n])


def run_buckets(student: Student, workload: dict[str, Any]) -> None:
    """Grade the student's buckets, with the grader's buffers and recordings."""
    runner, slots = runner_of(student), workload["slots"]
    if slots < 1:
        raise Invalid
    keys = list(runner.buckets(slots))
    plain = Plain([key.rows for key in keys])
    if hasattr(runner, "recordings"):

        def capture(keys: Sequence[GraphKey], build: Any, forward: Any) -> None:
            for rows in range(1, slots + 1):
                runner.pick(rows, 1, True)  # nothing is recorded yet
            Plain.capture(plain, keys, build, forward)
            tell(runner, plain.recordings)

        plain.capture, plain.pick = capture, runner.pick  # type: ignore[method-assign]
    else:
        plain = runner
    rig = play(plain, workload)
    check_sizes(student)
    for rows in range(1, slots + 1):
        key = plain.pick(rows, 1, True)
        if key is None:
            seen = f"No bucket holds a step of {rows} rows; max_running_requests is {slots}."
            raise Broken("too-small", "Each possible decode step fits into a bucket.", seen)
        if key.rows > 2 * rows:
            seen = f"A step of {rows} rows is padded to {key.rows}."
            raise Broken("wasteful", "A step is padded to at most twice its rows.", seen)
    check_closed(runner, slots)
    if len(rig.keys) > max(8, slots // 2):
        seen = f"For {slots} rows there are {len(rig.keys)} buckets; at most {max(8, slots // 2)} are allowed."
        promise = "The number of buckets is small: recording one takes time, and each keeps its memory."
        raise Broken("too-many", promise, seen)


def tell(runner: Any, recordings: dict[GraphKey, Any]) -> None:
    """Give the skeleton's runner recordings that the grader made.

    Another runner may look buckets up in a list that only its `capture` fills. So if `pick` still finds no bucket, or
    fails, `capture` is called too.
    """
    runner.recordings.update(recordings)
    found = None
    with suppress(Exception):
        found = runner.pick(1, 1, True)
    if recordings and found is None:

        def record(self: Recorder, forward: Any, inputs: GraphKey, **more: Any) -> Any:
            return recordings[inputs]

        with patch.object(Recorder, "record", record):
            runner.capture(sorted(recordings), lambda key: key, lambda inputs: torch.empty(0))


def check_closed(runner: Any, slots: int) -> None:
    """Close a runner and check that it finds no bucket any more."""
    runner.close()
    for rows in range(1, slots + 1):
        key = runner.pick(rows, 1, True)
        if key is not None:
            seen = f"After `close`, `pick({rows}, 1, True)` returned the bucket of {key.rows} rows."
            raise Broken("pick", "A runner finds the buckets that are recorded now, and no others.", seen)


def check_sizes(student: Student) -> None:
    """Check the buckets of large servers, and that they obey the option ``max_rows``, without recording them."""
    if "max_rows" not in {f.name for f in fields(student.config())}:
        return
    many = [(rows, rows) for rows in (*range(1, 131), 256, 257, 700, 1023, 2500)]
    for slots, limit in (*many, (64, 5), (5, 64), (64, 1)):
        runner = student.make(student.config(max_rows=limit), device=CPU)
        sizes = [key.rows for key in runner.buckets(slots)]
        where, show = f"The buckets are {some(sizes)}", f"max_running_requests {slots}, graph.max_rows {limit}"
        if sizes[-1:] != [min(slots, limit)]:
            cause = "too-small" if not sizes or sizes[-1] < min(slots, limit) else "max-rows"
            promise = (
                f"The largest bucket has {min(slots, limit)} rows: the most that a step has and the option allows."
            )
            raise Broken(cause, promise, f"{where}.", show=show)
        if len(sizes) > max(8, slots // 2):
            raise Broken("too-many", "The number of buckets is small.", f"{where}.", show=show)
        if sizes != sorted(set(sizes)) or sizes[0] < 1:
            raise Broken("buckets", RULES["buckets"], f"{where}.", show=show)
        for before, size in zip([0, *sizes[:-1]], sizes, strict=True):
            if size > 2 * (before + 1):
                seen = f"{where}. A step of {before + 1} rows is padded to {size}."
                raise Broken("wasteful", "A step is padded to at most twice its rows.", seen, show=show)
        if hasattr(runner, "recordings"):
            tell(runner, {GraphKey(size): None for size in reversed(sizes)})
            for rows in {1, 2, 3, sizes[-1] // 2 + 1, max(1, sizes[-1] - 1), sizes[-1], sizes[-1] + 1}:
                key, want = runner.pick(rows, 1, True), next((size for size in sizes if size >= rows), None)
                if want != (key.rows if key is not None else None):
                    got = "no bucket" if key is None else f"the bucket of {key.rows} rows"
                    seen = f"{where}. A step of {rows} rows got {got}."
                    raise Broken("pick", RULES["pick"], seen, show=show)


def make_buckets(rng: random.Random, size: int) -> dict[str, Any]:
    """Return a random workload, and once an engine with up to 64 rows: its numbers of rows have one and two digits."""
    workload = make(rng, size)
    return {"slots": 64, "steps": [1, 64, 33]} if size == 4 else workload


def run_all(student: Student, workload: dict[str, Any]) -> None:
    """Grade the whole runner."""
    runner = runner_of(student)
    made: list[Recorder] = []
    recorded_keys: list[int] = []
    launches: list[Recording] = []
    results: list[Tensor] = []
    begin, real = Recorder.__init__, Recorder.record

    def counted_begin(self: Recorder, device: torch.device) -> None:
        made.append(self)
        begin(self, device)

    def counted_record(self: Recorder, forward: Any, inputs: Any, **more: Any) -> Recording:
        recorded_keys.append(inputs.tokens.packed.shape[1])
        recording = real(self, forward, inputs, **more)
        results.append(recording.out)
        return Counted(recording, launches)

    for rows in range(1, max(1, workload["slots"]) + 1):
        runner.pick(rows, 1, True)  # nothing is recorded yet
    with patch.object(Recorder, "__init__", counted_begin), patch.object(Recorder, "record", counted_record):
        try:
            rig = play(runner, workload)
        except Broken as fault:
            if fault.cause != "answer" or launches or not recorded_keys:
                raise
            seen = "`run` returned, and did not call `replay()` of the recording."
            raise Broken("eager", RULES["eager"], seen, step=fault.step) from fault
    recorded = list(dict.fromkeys(rig.computed))
    if recorded != sorted(recorded, reverse=True):
        seen = f"The buckets were recorded in the order {recorded} (rows)."
        raise Broken("largest-first", "The largest bucket is recorded first: the others reuse its memory.", seen)
    if len(recorded_keys) > len(rig.keys):
        seen = f"There are {len(rig.keys)} buckets; `record` was called for the rows {recorded_keys}."
        raise Broken("capture", RULES["capture"], seen)
    if len(made) > 1 and len(rig.keys) > 1:
        seen = f"For {len(rig.keys)} buckets, {len(made)} objects of the class `Recorder` were made."
        raise Broken("recorders", "One `Recorder` records all buckets, so that they share their memory.", seen)
    if isinstance(getattr(runner, "replays", None), int) and runner.replays != rig.replays:
        seen = f"`run` was called {rig.replays} times, and `replays` is {runner.replays}."
        raise Broken("counted", "`replays` counts the replays.", seen)
    for key in rig.keys:
        with DeviceReads(results) as reads:
            first = runner.run(key)
        check_no_wait(reads, "`run`")
        second = runner.run(key)
        if first.data_ptr() != second.data_ptr():
            seen = f"Two calls of `run` for the bucket of {key.rows} rows returned tensors at two addresses."
            raise Broken("output", "The result of a replay is always the same output tensor.", seen)
        if len(first) != key.rows:
            seen = f"The result for the bucket of {key.rows} rows has {len(first)} rows."
            raise Broken("output", "The result of a replay is the recording's output tensor.", seen)
    check_two_runners(student, workload)
    if len(rig.keys) > 1:
        check_further_keys(runner_of(student))
    check_closed(runner, workload["slots"])
    check_dropped(runner_of(student), workload["slots"])


def check_dropped(runner: Any, slots: int) -> None:
    """Check that no recording and no output of a replay is held after `close`."""
    recordings: list[weakref.ref[Any]] = []
    memory: list[StorageWeakRef] = []
    real = Recorder.record

    def noted(self: Recorder, forward: Any, inputs: Any, **more: Any) -> Recording:
        recording = real(self, forward, inputs, **more)
        recordings.append(weakref.ref(recording))
        memory.append(StorageWeakRef(recording.out.untyped_storage()))
        return recording

    with patch.object(Recorder, "record", noted):
        rig = GraphRig(runner, slots)
    for key in rig.keys:
        runner.run(key)
    runner.close()
    del rig
    gc.collect()
    held = [
        f"{alive} of {len(recordings)} {what}"
        for what, alive in (
            ("recordings", sum(recording() is not None for recording in recordings)),
            ("outputs", sum(not out.expired() for out in memory)),
        )
        if alive
    ]
    if held:
        seen = f"After `close`, the runner still holds {' and '.join(held)}."
        raise Broken("closed", "`close` drops the recordings and their memory.", seen)


def check_further_keys(runner: Any) -> None:
    """Check that the largest bucket is recorded first where `capture` gets keys that `buckets` did not return."""
    sizes = (1, 2, 4, 8, 16)
    keys = [*(GraphKey(size) for size in sizes), *(GraphKey(size, shared_prefix=True) for size in sizes)]
    given = list(keys)
    recorded: list[GraphKey] = []

    def record(self: Recorder, forward: Any, inputs: GraphKey, **more: Any) -> Made:
        recorded.append(inputs)
        return Made(torch.tensor([keys.index(inputs)]))

    with patch.object(Recorder, "record", record):
        runner.capture(keys, lambda key: key, lambda inputs: torch.empty(0))
    if keys != given:
        raise Broken("changes", "`keys` must not change.", "`capture` changed the list of buckets that it got.")
    rows = [key.rows for key in recorded]
    if rows[0] != sizes[-1] or (keys[-1] in recorded and recorded[0] != keys[-1]):
        seen = f"`capture` got two buckets of each of {list(sizes)} rows, and recorded them in the order {rows}."
        if rows[0] == sizes[-1]:
            seen += f" The first of {rows[0]} rows was the one without `shared_prefix`, which is smaller."
        raise Broken("largest-first", "The largest bucket is recorded first: the others reuse its memory.", seen)
    further = "Half of the keys have `shared_prefix`, and as many rows as another key."
    if sorted(recorded) != sorted(keys):
        seen = f"`capture` got two buckets of each of {list(sizes)} rows, and recorded {rows}. {further}"
        raise Broken("capture", "`capture` records each of its keys, also those that `buckets` did not return.", seen)
    for i, key in enumerate(keys):
        if runner.run(key).tolist() != [i]:
            seen = f"`run({key})` replayed the recording of another bucket. {further}"
            raise Broken("capture", "`run` replays the recording of its key.", seen)
    for size, want in ((1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (9, 16), (16, 16)):
        if (picked := runner.pick(size, 1, True)) != GraphKey(want):
            seen = f"`pick({size}, 1, True)` returned {picked}, not {GraphKey(want)}. {further}"
            raise Broken("pick", "A step gets a bucket that `buckets` returned.", seen)


class Made:
    """A recording of nothing, whose result is ``out``."""

    def __init__(self, out: Tensor):
        self.out = out

    def replay(self) -> Tensor:
        """Return the result."""
        return self.out


def check_two_runners(student: Student, workload: dict[str, Any]) -> None:
    """Check two runners of one process, which record one after the other and then replay in turns."""
    slots = workload["slots"]
    promise = "Each engine has its own runner, with its own buffers and recordings."
    used: list[list[Recorder]] = []
    real = Recorder.record

    def noted(self: Recorder, forward: Any, inputs: Any, **more: Any) -> Recording:
        used[-1].append(self)
        return real(self, forward, inputs, **more)

    def make_rig() -> GraphRig:
        used.append([])
        return GraphRig(runner_of(student), slots)

    try:
        with patch.object(Recorder, "record", noted):
            rigs = [make_rig() for _ in range(2)]
        if any(recorder in used[0] for recorder in used[1]):
            seen = "Two engines of one process recorded their buckets with the same `Recorder`."
            raise Broken("shared", promise, seen)
        rigs[0].run(workload["steps"][:1])
        for rows in workload["steps"][:4]:
            for rig in reversed(rigs):
                rig.run([rows])
    except GraphFault as fault:
        seen = f"Two engines of one process replayed in turns; one engine alone was right. Here {fault.text}."
        raise Broken("shared", promise, seen) from fault


# ---- in the engine --------------------------------------------------------------------------------------------


def count(student: Student) -> str:
    """Count the replays of decode steps of `tutor`, and the rows of padding in them."""
    from minisgl.core import SamplingParams
    from minisgl.llm import LLM

    recorded: list[int] = []
    launches: list[Recording] = []
    real = Recorder.record

    def record(self: Recorder, forward: Any, inputs: Any, **more: Any) -> Recording:
        tape = real(self, forward, inputs, **more)
        recorded.append(len(tape.operations))  # type: ignore[attr-defined]
        return Counted(tape, launches)

    words = ["device=cpu", "num_pages=128", *SERVER, "max_running_requests=6"]
    rng = student.random
    lengths = [rng.randint(6, 30) for _ in range(6)]
    with (
        patch.object(Recorder, "record", record),
        LLM("tutor", overrides=[*words, f"plugins={student.path}", *student.lab.words]) as llm,
    ):
        engine: Any = llm.engine
        decode: list[int] = []
        replays: list[int] = []
        launch, run = engine.launch, engine.graph.run

        def counted_launch(step: Step) -> None:
            if step.num_decode == step.rows:
                decode.append(step.rows)
            launch(step)

        def counted_run(key: GraphKey) -> Tensor:
            replays.append(key.rows)
            logits: Tensor = run(key)
            return logits

        engine.launch, engine.graph.run = counted_launch, counted_run
        launches.clear()
        params = [SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True) for n in lengths]
        llm.generate([[5 + i, 6, 7] for i in range(6)], params, progress=False)
    if len(replays) != len(decode):
        seen = f"The engine ran {len(decode)} decode steps and {len(replays)} replays."
        raise Broken("eager", "Every decode step is one replay.", seen)
    if recorded and len(launches) != len(decode):
        seen = f"The engine ran {len(decode)} decode steps and launched recordings {len(launches)} times."
        raise Broken("again" if len(launches) > len(decode) else "eager", "Every decode step is one replay.", seen)
    padded = sum(replays) - sum(decode)
    if padded > sum(decode):
        seen = f"The steps had {padded} rows of padding and {sum(decode)} rows of requests."
        raise Broken("wasteful", "A step is padded to at most twice its rows.", seen)
    what = f"{max(recorded)} operations become one replay: " if recorded else ""
    return f"{what}{len(replays)} decode steps, {len(replays)} replays, {padded} of {sum(replays)} rows are padding"


def graph_kit() -> type:
    """Import and return the conformance kit of graph runners."""
    from minisgl.testing.graph import GraphConformance

    return GraphConformance


def causes(text: str) -> str | None:
    """Return the lab's cause for a message of the conformance kit, which begins with the rule in brackets."""
    rule = text[1 : text.find("]")] if text.startswith("[") else ""
    return rule if rule in RULES else "pick" if "pick" in text or "recorded" in text else None


def _part(name: str, says: str, make: Callable[[random.Random, int], Any], run: Callable[[Student, Any], None]) -> Gate:
    return Gate(name, says, search(make, run, tries=12, seconds=0.6, show=draw), part=f"replay.{name}")


GATES: Sequence[Gate] = (
    _part("buffers", "the input buffers are static, and padding rows change no data of a request", make, run_buffers),
    _part("buckets", "there are few buckets, and a step gets the smallest bucket that fits", make_buckets, run_buckets),
    _part("capture", "each bucket is recorded once and replayed in any order", make_buckets, run_all),
    conformance(graph_kit, runner_of, causes=causes),
    Gate("count", "a decode step needs a single replay", count, limit=30.0),
    greedy(["graph=none"], SERVER),
    facts(["pick", "run"]),
)


TIMES, MOST_PADDING, MOST_GRAPHS = "times the padding of buckets that double", 0.64, 7
"""Doubled sizes and one between 32 and 64 reach 0.70, and the best sizes 0.58."""


def measure_stretch(student: Student) -> tuple[str, bool]:
    """Measure the padding of the student's buckets for a server that has one user, a few, or many."""
    padded, graphs, eager = padding(student)
    counted = f"{padded:.2f} {TIMES}, {graphs} graphs" + (f", {eager:,} steps without one" if eager else "")
    return counted, round(padded, 2) <= MOST_PADDING and graphs <= MOST_GRAPHS and not eager


STRETCH = Stretch(
    f"A third of {STEPS:,} decode steps has one row, a third about {FEW} rows, and a third about {MANY}, of at most "
    f"{MOST_ROWS}. The padding of a step is its rows of padding, divided by its rows. That of the {MOST_GRAPHS} graphs "
    f"of `replay` has the number 1.00. Have at most {MOST_PADDING} times as much, with no more graphs. The steps are "
    "new in each run.",
    measure_stretch,
)
