"""Lab `replay`: the student's buffers, buckets and recordings in a tiny engine whose sums show a stale row or a page
that padding overwrote (`minisgl.testing.graph`), each part with the core's own in place of the others.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from minisgl.attention import GraphKey
from minisgl.core import Step
from minisgl.course.lab.grader.conformance import conformance, greedy
from minisgl.course.lab.grader.gate import Broken, Gate, Invalid, Student
from minisgl.course.lab.grader.search import search
from minisgl.course.lab.grader.server_gate import facts
from minisgl.engine.graph import StaticInputs
from minisgl.engine.record import Recorder, Recording
from minisgl.engine.simulated_graph import GraphViolation
from minisgl.testing.graph import RULES, GraphFault, GraphRig

CPU = torch.device("cpu")
SERVER = ["attention=torch", "max_running_requests=12"]
"""Attention that can be recorded on a CPU, and few buckets to record."""


class Counted:
    """A recording that counts its launches, together with others."""

    def __init__(self, recording: Recording, launches: list[Recording]):
        self.out, self._recording, self._launches = recording.out, recording, launches

    def replay(self) -> Tensor:
        self._launches.append(self._recording)
        return self._recording.replay()


class Plain:
    """A runner that has everything but what a gate puts in its place: one bucket for each size that is asked for."""

    def __init__(self, sizes: Sequence[int]):
        self.recordings: dict[GraphKey, Recording] = {}
        self._sizes = sizes

    def buckets(self, max_rows: int) -> Sequence[GraphKey]:
        return [GraphKey(size) for size in self._sizes]

    def capture(
        self,
        keys: Sequence[GraphKey],
        build: Callable[[GraphKey], StaticInputs],
        forward: Callable[[Any], Tensor],
    ) -> None:
        recorder = Recorder(CPU)
        for key in keys:
            self.recordings[key] = recorder.record(forward, build(key))

    def pick(self, rows: int, q_len: int, uniform: bool) -> GraphKey | None:
        fits = [key for key in self.recordings if key.rows >= rows]
        return min(fits, default=None) if uniform and q_len == 1 else None

    def run(self, key: GraphKey) -> Tensor:
        return self.recordings[key].replay()

    def close(self) -> None:
        self.recordings.clear()


def runner_of(student: Student) -> Any:
    return student.make(device=CPU)


def make(rng: random.Random, size: int) -> dict[str, Any]:
    """Steps of so many rows; small engines first. The first few go up and down, as a server's batches do."""
    most = min(1 + size // 2, 9)
    steps = [most, most, *(rng.randint(1, most) for _ in range(min(2 + size, 16)))]
    return {"slots": most, "steps": steps}


def draw(workload: dict[str, Any]) -> str:
    """The workload in a line."""
    steps = ", ".join(map(str, workload["steps"]))
    return f"{workload['slots']} slots; " + (f"decode steps of {steps} rows" if steps else "only recorded, no step")


def play(runner: Any, workload: dict[str, Any]) -> GraphRig:
    """The workload on the rig. Raises `Broken`, and `Invalid`."""
    slots, steps = workload["slots"], workload["steps"]
    if slots < 1 or not all(1 <= rows <= slots for rows in steps):
        raise Invalid
    try:
        rig = GraphRig(runner, slots)
        rig.run(steps)
    except GraphFault as fault:
        where = f" (bucket of {fault.bucket} rows)" if fault.bucket else ""
        seen = f"{fault.text[:1].upper()}{fault.text[1:]}{where}."
        raise Broken(fault.rule, RULES[fault.rule], seen, step=fault.step) from fault
    except GraphViolation as fault:
        cause = "rebound" if fault.rule == "static-buffer" else "capture"
        raise Broken(cause, RULES[cause], fault.text) from fault
    return rig


# ---- the parts ----------------------------------------------------------------------------------------------


def run_buffers(student: Student, workload: dict[str, Any]) -> None:
    """The student's buffers; buckets and recordings are the core's."""
    runner, plain = runner_of(student), Plain([workload["slots"]] if workload["slots"] else [])
    if not hasattr(runner, "input_buffers"):
        raise Broken("capture", "The runner makes its own buffers.", "It has no method `input_buffers`.")
    plain.input_buffers = runner.input_buffers  # type: ignore[attr-defined]
    play(plain, workload)


def run_buckets(student: Student, workload: dict[str, Any]) -> None:
    """The student's buckets; buffers and recordings are the core's."""
    runner, slots = runner_of(student), workload["slots"]
    if slots < 1:
        raise Invalid
    keys = list(runner.buckets(slots))
    plain = Plain([key.rows for key in keys])
    if hasattr(runner, "recordings"):

        def capture(keys: Sequence[GraphKey], build: Any, forward: Any) -> None:
            Plain.capture(plain, keys, build, forward)
            runner.recordings.update(plain.recordings)

        plain.capture, plain.pick = capture, runner.pick  # type: ignore[method-assign]
    else:
        plain = runner
    rig = play(plain, workload)
    for rows in range(1, slots + 1):
        key = plain.pick(rows, 1, True)
        if key is None:
            seen = f"A step of {rows} rows, and {slots} may come, runs operation by operation."
            raise Broken("too-small", "The largest step that there can be fits a bucket.", seen)
        if key.rows > 2 * rows:
            seen = f"A step of {rows} rows is padded to {key.rows}."
            raise Broken("wasteful", "A step is padded to at most twice its rows.", seen)
    if len(rig.keys) > max(8, slots // 2):
        seen = f"For {slots} rows there are {len(rig.keys)} buckets."
        raise Broken("too-many", "A few buckets: each is recorded at the start, and keeps its memory.", seen)


def make_buckets(rng: random.Random, size: int) -> dict[str, Any]:
    workload = make(rng, size)
    return {"slots": 64, "steps": [1, 64, 33]} if size == 4 else workload


def run_all(student: Student, workload: dict[str, Any]) -> None:
    """The whole runner."""
    play(runner_of(student), workload)


# ---- in the engine --------------------------------------------------------------------------------------------


def count(student: Student) -> str:
    """A decode step of tutor is one replay, whatever it was in operations; padding is what the buckets leave over."""
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
        seen = f"{len(decode)} decode steps, and {len(replays)} replays."
        raise Broken("eager", "Every decode step is one replay.", seen)
    if recorded and len(launches) != len(decode):
        seen = f"{len(decode)} decode steps, and {len(launches)} launches of what was recorded."
        raise Broken("again" if len(launches) > len(decode) else "eager", "Every decode step is one replay.", seen)
    padded = sum(replays) - sum(decode)
    if padded > sum(decode):
        seen = f"{padded} rows of padding for {sum(decode)} of requests."
        raise Broken("wasteful", "A step is padded to at most twice its rows.", seen)
    what = f"{max(recorded)} operations become one replay: " if recorded else ""
    return f"{what}{len(replays)} decode steps, {len(replays)} replays, {padded} padded rows of {sum(replays)}"


def graph_kit() -> type:
    from minisgl.testing.graph import GraphConformance

    return GraphConformance


def causes(text: str) -> str | None:
    """The rule that the kit says was broken."""
    rule = text[1 : text.find("]")] if text.startswith("[") else ""
    return rule if rule in RULES else "pick" if "pick" in text or "recorded" in text else None


def _part(name: str, says: str, make: Callable[[random.Random, int], Any], run: Callable[[Student, Any], None]) -> Gate:
    return Gate(name, says, search(make, run, tries=12, seconds=0.6, show=draw), part=f"replay.{name}")


GATES: Sequence[Gate] = (
    _part("buffers", "static buffers, and what stands in a row of padding", make, run_buffers),
    _part("buckets", "a few sizes, and the smallest that holds a step", make_buckets, run_buckets),
    _part("capture", "recorded once, replayed in any order", make, run_all),
    conformance(graph_kit, runner_of, causes=causes),
    Gate("count", "a decode step is one replay", count, limit=30.0),
    greedy(["graph=none"], SERVER),
    facts(["pick", "run"]),
)
