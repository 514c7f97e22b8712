"""Lab `meter`: every timing is held against a clock that the gate turns, on random workloads with hang-ups."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from minisgl.core import Output, Req, SamplingParams, Step, StepResult
from minisgl.course.lab.grader.gate import Broken, Gate, Invalid, Student
from minisgl.course.lab.grader.observed import observer, run, watch
from minisgl.course.lab.grader.search import search
from minisgl.course.lab.grader.server_gate import Served, facts
from minisgl.course.lab.grader.simulated_workloads import random_workload, show
from minisgl.testing.small import tight

POLICIES = ("mixed", "prefill_first", "decode_first", "static")


class Truth:
    """What each request's timing is, from what its client saw; and what one might have taken for it."""

    def __init__(self, meter: Any, host: Any, workload: dict[str, Any]):
        self.meter = meter
        self.drive = drive = watch(workload, host)
        scheduler = drive.scheduler
        scheduler.clock = self.now
        self.arrived: dict[int, float] = {}
        self.tokens: dict[int, list[float]] = {}
        self.rows: dict[int, list[float]] = {}  # when each step with a row of it was scheduled
        self.chunks: dict[int, list[float]] = {}  # when results were read of rows that sample nothing
        self.discarded: dict[int, list[float]] = {}  # and of rows whose token nobody got
        self.retracted: set[int] = set()
        drive.look = self.look
        self._listen(scheduler.events)

    def now(self) -> float:
        """Seconds, as they are during the scheduler's turn."""
        return self.time(self.drive.report.steps)

    def time(self, steps: int) -> float:
        """Seconds at a turn. Turns take unlike times, so that no two waits are alike by chance."""
        return 2 * steps + steps * 40503 % 256 / 256

    def _listen(self, events: Any) -> None:
        """Beside the student's hooks."""
        added, scheduled, retracted = events.request_added, events.batch_scheduled, events.request_retracted
        flights: list[list[tuple[int, bool]]] = []

        def request_added(req: Req, now: float) -> None:
            self.arrived[req.uid] = now
            added(req, now)

        def batch_scheduled(step: Any, reqs: Sequence[Req], now: float) -> None:
            for req in reqs:
                self.rows.setdefault(req.uid, []).append(now)
            flights.append([(req.uid, bool(sample)) for req, sample in zip(reqs, step.sample, strict=True)])
            scheduled(step, reqs, now)

        def request_retracted(req: Req, step: int) -> None:
            self.retracted.add(req.uid)
            retracted(req, step)

        finished = events.step_finished

        def step_finished(result: Any, reqs: Any, now: float) -> None:
            for (uid, sample), gained in zip(flights.pop(0), reqs, strict=True):
                if gained is None:
                    (self.discarded if sample else self.chunks).setdefault(uid, []).append(now)
            finished(result, reqs, now)

        events.request_added, events.batch_scheduled = request_added, batch_scheduled
        events.request_retracted, events.step_finished = request_retracted, step_finished

    def look(self, output: Output | None) -> None:
        """A turn has ended (the steps count it already): its tokens came in it."""
        for uid in output.uids if output is not None else ():
            self.tokens.setdefault(uid, []).append(self.time(self.drive.report.steps - 1))
        if hasattr(self.meter, "timing"):
            for uid in self.drive.scheduler.requests:
                self.ask(uid)

    def ask(self, uid: int) -> None:
        """The timing so far of a request that goes on; asking changes nothing."""
        told = self.meter.timing(uid)
        self.judge(uid, told.ttft, list(told.gaps))
        try:
            same = self.meter.timing(uid) == told
        except LookupError:
            same = False
        if not same:
            promise = "`timing` says how an open request is doing, as often as it is asked."
            raise Broken("asking", promise, "Asked a second time at once, it did not say the same.", request=uid)

    def timing(self, uid: int) -> tuple[float | None, list[float]]:
        """Time to first token, and gaps."""
        times = self.tokens.get(uid, [])
        return (times[0] - self.arrived[uid] if times else None, _gaps(times))

    def judge(self, uid: int, ttft: float | None, gaps: list[float]) -> None:
        """Raise `Broken` where that is not the timing."""
        first, right = self.timing(uid)
        if ttft == first and gaps == right:
            return
        times, rows, chunks, discarded = (x.get(uid, []) for x in (self.tokens, self.rows, self.chunks, self.discarded))
        told = list(accumulate(gaps, initial=self.arrived[uid] + (ttft or 0.0)))
        extra = set(told) - set(times)
        if ttft != first:
            cause, promise = "first-token", "The first token's time runs from the request's arrival."
            seen = f"Its first token took {_short([first])}; the meter says {_short([ttft])}."
            extra &= {told[0]} if ttft is not None else set()
        else:
            cause, promise = "gaps", "A gap is from one token of a request to its next."
            at = next((i for i, pair in enumerate(zip(gaps, right, strict=False)) if pair[0] != pair[1]), len(right))
            seen = f"From gap {at} on they are {_short(right[at:])}; the meter says {_short(gaps[at:])}."
        if extra & {*chunks}:
            cause = "chunk"
        elif extra & {*discarded}:
            cause = "discarded"
        elif ttft != first and rows and times and ttft == times[0] - rows[0]:
            cause = "starts-late"
        elif extra & {*rows}:
            cause = "chunk"
        elif uid in self.retracted and (ttft != first or len(gaps) < len(right)):
            cause = "retraction"
        elif ttft == first and len(gaps) == len(right):
            cause = "average"
        raise Broken(cause, promise, seen, request=uid)


def _gaps(times: Sequence[float]) -> list[float]:
    return [b - a for a, b in pairwise(times)]


def _short(values: Sequence[float | None]) -> str:
    shown = ["none" if value is None else f"{value:.2f}" for value in values[:4]]
    return (", ".join(shown) or "no more") + (", …" if len(values) > 4 else "")


def _client(number: int, own: int, answer: int, **more: int) -> dict[str, int]:
    return {"id": number, "stem": 0, "shared": 0, "own": own, "answer": answer, "arrive": 0, **more}


def _few(*jobs: dict[str, int], **more: Any) -> dict[str, Any]:
    plain = {"page_size": 4, "pages": 20, "slots": 3, "chunk": 64, "policy": "mixed", "cache": "naive", "overlap": 0}
    return {**plain, "tight": 0, "jobs": list(jobs), **more}


FIRST = (
    lambda: _few(_client(1, 3, 2)),
    lambda: _few(_client(1, 20, 3), chunk=8),  # a prompt in three chunks
    lambda: _few(_client(1, 4, 5), _client(2, 4, 2, arrive=1), slots=1),  # one waits for the other's seat
    lambda: _few(_client(1, 4, 9, abort=4), _client(2, 4, 9, abort=5), overlap=1),  # leaves while a step runs
    lambda: _few(_client(1, 4, 5), _client(2, 4, 5, abort=1), slots=1),  # leaves without a token
    lambda: _few(_client(1, 9, 20), _client(2, 9, 20), pages=9, tight=1),  # one makes way for the other
    lambda: _few(_client(1, 9, 20), _client(2, 9, 20), pages=9, tight=1, overlap=1),  # and its last token is discarded
    lambda: _few(_client(1, 4, 12), _client(2, 30, 3, arrive=2), chunk=8, policy="prefill_first"),  # an answer pauses
)
"""What real servers live through, one thing at a time; after these, random workloads."""


def make(rng: random.Random, size: int) -> dict[str, Any]:
    if size <= len(FIRST):
        return FIRST[size - 1]()
    more = {"policy": rng.choice(POLICIES), "cache": rng.choice(["naive", "radix"])}
    return {**random_workload(rng, size), **more, "overlap": rng.randint(0, 1), "tight": rng.randint(0, 1)}


def serve(student: Student, workload: dict[str, Any]) -> tuple[Any, Truth]:
    """The student's meter over the workload, with what is true of it."""
    meter, host = observer(student, "ended")
    truth = Truth(meter, host, workload)
    before = len(meter.ended)
    with tight() if workload["tight"] else nullcontext():
        run(truth.drive, workload)
    if before:
        seen = f"A new meter, before any request, had {before} timings already: an older meter's."
        raise Broken("shared", "Each server has a meter of its own.", seen)
    return meter, truth


def run_clock(student: Student, workload: dict[str, Any]) -> None:
    meter, truth = serve(student, workload)
    told = {timing.uid: timing for timing in meter.ended}
    for uid in truth.arrived:
        if uid not in told:
            left = truth.timing(uid)[0] is None
            seen = "It ended" + (" without a token: its client had left" if left else "") + ", and has no timing."
            raise Broken("lost", "Every request that ends has a timing.", seen, request=uid)
        truth.judge(uid, told[uid].ttft, list(told[uid].gaps))
    if len(meter.ended) != len(truth.arrived):
        seen = f"{len(truth.arrived)} requests ended, and there are {len(meter.ended)} timings."
        raise Broken("lost", "Every request that ends has one timing.", seen)


def kept(meter: Any) -> Counter[str]:
    """How many things each of its containers holds, beside the timings of the requests that have ended. One of a fixed
    length can't grow."""
    held = {n: value for n, value in vars(meter).items() if n != "ended" and getattr(value, "maxlen", None) is None}
    kinds = dict | list | set | tuple | deque | np.ndarray
    return Counter({name: len(value) for name, value in held.items() if isinstance(value, kinds)})


def run_kept(student: Student, workload: dict[str, Any]) -> None:
    """All have ended: nothing of them may stay behind, beside their timings."""
    before = kept(observer(student, "ended")[0])  # say, a histogram's buckets
    meter, truth = serve(student, workload)
    left, ended = kept(meter) - before, len(truth.arrived)
    if left.total() >= ended:
        where = ", ".join(f"{n} in self.{name}" for name, n in left.items())
        gone = "1 request has ended" if ended == 1 else f"{ended} requests have ended"
        seen = f"{gone}, and something is still kept: {where}."
        raise Broken("keeps", "What is kept does not grow with the requests that were served.", seen)


def run_long(student: Student) -> None:
    """A long life in little time: the hooks alone, one token for each of many requests."""
    meter, host = observer(student, "ended")
    hook, zero, one, many = host.hook, np.zeros(1, np.int32), np.ones(1, np.int32), 12_000
    for uid in range(many):
        req = Req(uid, zero, SamplingParams(max_tokens=1), uid)
        step = Step(uid, zero, zero, one, 0, one.astype(bool), zero, (zero, zero, zero))
        hook.minisgl_request_added(req=req, now=float(uid))
        hook.minisgl_batch_scheduled(step=step, reqs=[req], now=float(uid))
        hook.minisgl_step_finished(result=StepResult(uid, zero[None], one), reqs=[req], now=float(uid))
        hook.minisgl_request_finished(req=req, now=float(uid))
    if len(meter.ended) >= many:
        seen = f"{many} requests have ended, and `ended` holds all their timings. KEPT says how many are wanted."
        raise Broken("keeps", "The oldest timings are forgotten.", seen)


def try_kept(student: Student) -> str:
    said = search(make_kept, run_kept, seconds=0.6, show=show)(student)
    if student.replay is None:
        run_long(student)
    return said


def make_kept(rng: random.Random, size: int) -> dict[str, Any]:
    workload = make(rng, size + len(FIRST))
    if rng.random() < 0.5:  # who leaves at once never has a token
        for job in workload["jobs"]:
            job["abort"] = 0
    return workload


def queue(student: Student) -> str:
    """Queueing is in the first token's time and in no gap: one slot, two requests, in exact numbers."""
    timings = []
    for slots in (2, 1):
        workload = _few(_client(1, 4, 6), _client(2, 4, 6), slots=slots)
        meter, host = observer(student, "ended")
        truth = Truth(meter, host, workload)
        truth.time = float  # type: ignore[method-assign, assignment]
        run(truth.drive, workload)
        timings.append(next((t for t in meter.ended if t.uid == 2), None))
    alone, queued = timings
    if alone is None or queued is None:
        raise Invalid
    expected = ((0.0, 1.0), (6.0, 1.0))
    seen = tuple((t.ttft, max(t.gaps, default=None)) for t in (alone, queued))
    if seen != expected:
        text = f"With two slots and with one, request 2's first token and worst gap are {seen}, and not {expected}."
        raise Broken("first-token", "Queueing hurts the first token only.", text)
    return "a request that queues for 6 steps: first token 0 -> 6, worst gap 1 -> 1"


def metrics(served: Served) -> str:
    """What the meter exposes counts the requests that the gate before has sent."""
    assert served.server is not None
    found = served.server.metrics()
    ttft = found.get("minisgl_meter_ttft_seconds_count", 0.0)
    gaps = found.get("minisgl_meter_gap_seconds_count", 0.0)
    if ttft < 9 or gaps < 9:
        seen = f"Nine questions were answered; /metrics counts {ttft:.0f} first tokens and {gaps:.0f} gaps."
        raise Broken("lost", "/metrics shows the timings of all requests that have ended.", seen)
    return f"/metrics counts {ttft:.0f} first tokens and {gaps:.0f} gaps"


HOOKS = ["minisgl_request_added", "minisgl_step_finished", "minisgl_request_finished"]

GATES = (
    Gate(
        "clock",
        "each timing is exact on a virtual clock",
        search(make, run_clock, seconds=1.0, show=show),
        part="meter.clock",
    ),
    Gate("kept", "nothing stays of who has ended", try_kept),
    Gate("queue", "queueing hurts the first token only", queue),
    facts(HOOKS[:2]),
    Gate("metrics", "/metrics shows the timings", metrics, served=True),
)
