"""Gates of lab `meter`: each timing is compared with exact times of a simulated clock.

The meter observes the simulated engine, on workloads with aborts, and histories of hook calls without an engine
(`minisgl.chapters.lab.grader.timing_histories`).
"""

from __future__ import annotations

import gc
import random
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from minisgl.chapters.lab.grader.gate import Broken, Gate, Invalid, Stretch, Student, amount, apart
from minisgl.chapters.lab.grader.held import ARRAYS, container_sizes, traced
from minisgl.chapters.lab.grader.meter_memory import REQUESTS, ROWS, measure_memory
from minisgl.chapters.lab.grader.observer_runs import call_hooks, observer, run, watch
from minisgl.chapters.lab.grader.search import search
from minisgl.chapters.lab.grader.server_gate import Served, facts
from minisgl.chapters.lab.grader.simulated_workloads import random_workload, show
from minisgl.chapters.lab.grader.timing_histories import (
    START,
    Record,
    Stage,
    large_histories,
    make_history,
    show_history,
)
from minisgl.core import Output, Req, SamplingParams, Step, StepResult
from minisgl.testing.small import no_lookahead

RANDOM = 16
"""How many random workloads the gate `clock` runs at least."""
KEPT = 10_000
"""The number of timings that `ended` holds: the constant of the skeleton."""
POLICIES = ("mixed", "prefill_first", "decode_first", "static")


class Truth:
    """The right timing of each request, from the times at which its client gets tokens.

    It also records the times that common mistakes use instead: of rows, of chunks, of discarded tokens.
    """

    def __init__(self, meter: Any, host: Any, workload: dict[str, Any]):
        self.meter, self.host, self.asks = meter, host, hasattr(meter, "timing")
        self.drive = drive = watch(workload, host)
        scheduler = drive.scheduler
        scheduler.clock = self.now
        self.arrived: dict[int, float] = {}
        self.tokens: dict[int, list[float]] = {}
        self.rows: dict[int, list[float]] = {}  # times at which steps with a row of the request were scheduled
        self.chunks: dict[int, list[float]] = {}  # times at which results of rows without a sampled token were read
        self.discarded: dict[int, list[float]] = {}  # times at which results with a discarded token were read
        self.retracted: set[int] = set()
        drive.look = self.look
        self._listen(scheduler.events)

    def now(self) -> float:
        """Return the time of the current step in seconds: the scheduler's clock."""
        return self.time(self.drive.report.steps)

    def time(self, steps: int) -> float:
        """Return the time of a step in seconds. Steps take different times, so that two waits never match by chance."""
        return START + 2 * steps + steps * 40503 % 256 / 256

    def _listen(self, events: Any) -> None:
        """Record the scheduler's events, in addition to the student's hooks."""
        added, scheduled, retracted = events.request_added, events.batch_scheduled, events.request_retracted
        in_flight: list[
            list[tuple[int, bool]]
        ] = []  # for each launched step: (uid, whether the row samples) of its rows

        def request_added(req: Req, now: float) -> None:
            self.arrived[req.uid] = now
            added(req, now)

        def batch_scheduled(step: Any, reqs: Sequence[Req], now: float) -> None:
            for req in reqs:
                self.rows.setdefault(req.uid, []).append(now)
            in_flight.append([(req.uid, bool(sample)) for req, sample in zip(reqs, step.sample, strict=True)])
            scheduled(step, reqs, now)

        def request_retracted(req: Req, step: int) -> None:
            self.retracted.add(req.uid)
            retracted(req, step)

        finished = events.step_finished

        def step_finished(result: Any, reqs: Any, now: float) -> None:
            for (uid, sample), gained in zip(in_flight.pop(0), reqs, strict=True):
                if gained is None:
                    (self.discarded if sample else self.chunks).setdefault(uid, []).append(now)
            finished(result, reqs, now)

        events.request_added, events.batch_scheduled = request_added, batch_scheduled
        events.request_retracted, events.step_finished = request_retracted, step_finished

    def look(self, output: Output | None) -> None:
        """Record the tokens of the step that has just ended, and check the timings of the open requests.

        The number of steps in the report already includes this step.
        """
        for uid in output.uids if output is not None else ():
            self.tokens.setdefault(uid, []).append(self.time(self.drive.report.steps - 1))
        if self.asks:
            for uid in self.drive.scheduler.requests:
                self.ask(uid)

    def ask(self, uid: int) -> None:
        """Check the meter's timing of an open request, and that a second call returns the same."""
        reported = timing_of(self.meter, uid, bool(self.tokens.get(uid)))
        self.judge(uid, reported.ttft, list(reported.gaps))
        try:
            again = self.meter.timing(uid)
            same = (again.uid, again.ttft, list(again.gaps)) == (uid, reported.ttft, list(reported.gaps))
        except LookupError:
            same = False
        if not same:
            promise = "`timing` returns the timing of an open request without changing it."
            seen = "A second call of `timing` right after the first returned something else."
            raise Broken("asking", promise, seen, request=uid)

    def judge(self, uid: int, ttft: float | None, gaps: list[float]) -> None:
        """Raise `Broken` if ``ttft`` and ``gaps`` are not the right timing, with the cause that explains them."""
        tokens, rows, chunks, discarded = (
            x.get(uid, []) for x in (self.tokens, self.rows, self.chunks, self.discarded)
        )
        record = Record(self.arrived[uid], tokens, rows, chunks, discarded, uid in self.retracted)
        judge(uid, record, ttft, gaps)


def judge(uid: int, record: Record, ttft: float | None, gaps: list[float]) -> None:
    """Raise `Broken` if ``ttft`` and ``gaps`` are not the timing of a request, with the cause that explains them."""
    times, rows = record.tokens, record.rows
    first, right = times[0] - record.arrived if times else None, _gaps(times)
    if ttft == first and gaps == right:
        return
    reported = list(accumulate(gaps, initial=record.arrived + (ttft or 0.0)))
    extra = set(reported) - set(times)
    if ttft != first:
        cause, promise = "first-token", "The time to first token runs from the request's arrival to its first token."
        right_ttft, wrong_ttft = _short([first]), _short([ttft])
        if first is not None and ttft is not None:
            right_ttft, wrong_ttft = apart(first, ttft)
        seen = f"The right time to first token is {_unit(right_ttft)}; the meter says {wrong_ttft}."
        extra &= {reported[0]} if ttft is not None else set()
    else:
        cause, promise = "gaps", "A gap is the time between two consecutive tokens of one request."
        at = next((i for i, pair in enumerate(zip(gaps, right, strict=False)) if pair[0] != pair[1]), len(right))
        has = f"The answer has {amount(len(right), 'gap')}; the meter has {len(gaps)}."
        seen = has if len(gaps) != len(right) else ""
        if at < min(len(right), len(gaps)):
            shown = apart(right[at], gaps[at])
            seen = f"Gap {at} is {shown[0]} s; the meter says {shown[1]}. {seen}"
        elif at < max(len(right), len(gaps)):
            what = "The meter lacks" if at < len(right) else "The meter has too many:"
            seen = f"{seen} {what} gap {at}, {_short((right if at < len(right) else gaps)[at : at + 1])} s."
    known = ttft is not None and first is not None and len(gaps) == len(right)
    near = known and bool(np.isclose(ttft or 0.0, first or 0.0, rtol=1e-6, atol=0.0))
    if near and any(np.allclose(gaps, each, rtol=1e-6, atol=0.0) for each in (right, _single(times, record.arrived))):
        cause, promise = "rounded", "Each time is exact: a float of Python, with 64 bits."
    elif ttft == first and len(gaps) < len(right) and gaps == [gap for gap in right if gap]:
        cause, promise = "zero-gaps", "A gap may be 0: the results of two steps may be read at one time of the clock."
    elif ttft == first and gaps == [first, *right] and (first or not record.at_once):
        cause, promise = "first-gap", "The first gap runs from the first token to the second."
    elif ttft == first and len(gaps) > len(right) and list(filter(None, gaps)) == list(filter(None, right)):
        cause, promise = "at-once", "Tokens that a row gained at once count as one time."
    elif not times and ttft == 0.0:
        pass  # no row was counted: 0 stands for None
    elif extra & {*record.chunks}:
        cause = "chunk"
    elif extra & {*record.discarded}:
        cause = "discarded"
    elif ttft != first and rows and times and ttft == times[0] - rows[0]:
        cause = "starts-late"
    elif extra & {*rows}:
        cause = "chunk"
    elif record.retracted and (ttft != first or len(gaps) < len(right)):
        cause = "retraction"
    elif ttft == first and len(gaps) == len(right):
        cause = "average"
    elif len(gaps) < len(right) or (ttft is None and len(times) > 1):
        cause = "misses"
    raise Broken(cause, promise, seen, request=uid)


def _single(times: Sequence[float], arrived: float) -> Any:
    """Return the gaps between times that are kept as numbers of 32 bits, counted from the arrival."""
    return np.diff((np.array(times) - arrived).astype(np.float32).astype(np.float64))


def timing_of(meter: Any, uid: int, has_token: bool) -> Any:
    """Return the meter's timing of an open request. Raise `Broken` if it says that it is another request's."""
    try:
        timing = meter.timing(uid)
    except Exception as error:
        state = "is open" if has_token else "is open and has no token yet"
        error.add_note(f"The gate called `timing({uid})`; this request {state}.")
        raise
    if timing.uid != uid:
        raise Broken("gaps", "`uid` of a timing is the request's.", f"`uid` is {timing.uid!r:.40}.", request=uid)
    return timing


def _gaps(times: Sequence[float]) -> list[float]:
    return [b - a for a, b in pairwise(times)]


def _unit(seconds: str) -> str:
    return f"{seconds} s" if seconds != "none" else seconds


def _short(values: Sequence[float | None]) -> str:
    shown = ["none" if value is None else f"{value:.2f}" for value in values[:4]]
    return (", ".join(shown) or "no further gaps") + (", …" if len(values) > 4 else "")


def _client(number: int, own: int, answer: int, **more: int) -> dict[str, int]:
    return {"id": number, "stem": 0, "shared": 0, "own": own, "answer": answer, "arrive": 0, **more}


def _few(*jobs: dict[str, int], **more: Any) -> dict[str, Any]:
    plain = {"page_size": 4, "pages": 20, "slots": 3, "chunk": 64, "policy": "mixed", "cache": "naive", "overlap": 0}
    return {**plain, "tight": 0, "jobs": list(jobs), **more}


FIRST = (
    lambda: _few(_client(0, 3, 2)),  # 0 is a uid like any other
    # A prompt in three chunks, the first one long after the arrival.
    lambda: _few(_client(1, 4, 3), _client(2, 20, 3), chunk=8, slots=1),
    lambda: _few(_client(1, 4, 5), _client(2, 4, 2, arrive=1), slots=1),  # request 2 waits until request 1 has ended
    lambda: _few(_client(1, 4, 9, abort=4), _client(2, 4, 9, abort=5), overlap=1),  # aborted while a step is in flight
    lambda: _few(_client(1, 4, 5), _client(2, 4, 5, abort=1), slots=1),  # aborted before its first token
    lambda: _few(_client(1, 9, 20), _client(2, 9, 20), pages=9, tight=1),  # a request is retracted
    # With overlap, a retracted request also has a token in flight, which is discarded.
    lambda: _few(_client(1, 9, 20), _client(2, 9, 20), pages=9, tight=1, overlap=1),
    lambda: _few(_client(1, 4, 12), _client(2, 30, 3, arrive=2), chunk=8, policy="prefill_first"),  # an answer pauses
)
"""The first workloads of the search, each with one event of a real server. Random workloads follow."""


def make(rng: random.Random, size: int) -> dict[str, Any]:
    """Return workload number ``size`` of `FIRST`, or a random workload if ``size`` is greater than their number."""
    if size <= len(FIRST):
        return FIRST[size - 1]()
    large = large_histories()
    if size <= len(FIRST) + len(large):
        return large[size - len(FIRST) - 1]
    if size % 2:
        return make_history(rng, size)
    return random_run(rng, size)


def random_run(rng: random.Random, size: int) -> dict[str, Any]:
    """Return a random workload of the simulated engine."""
    more = {"policy": rng.choice(POLICIES), "cache": rng.choice(["naive", "radix"])}
    return {**random_workload(rng, size), **more, "overlap": rng.randint(0, 1), "tight": rng.randint(0, 1)}


def serve(student: Student, workload: dict[str, Any], ask: bool = True) -> tuple[Any, Truth]:
    """Run the workload with the student's meter. Return the meter and the right timings."""
    meter, manager = observer(student, "ended")
    truth = Truth(meter, manager, workload)
    truth.asks = ask and hasattr(meter, "timing")
    before = len(meter.ended)
    with no_lookahead() if workload["tight"] else nullcontext():
        run(truth.drive, workload)
    if before:
        seen = f"A new meter had {before} timings in `ended` before any request: those of an earlier meter."
        raise Broken("shared", "Each server has its own meter.", seen)
    return meter, truth


def run_clock(student: Student, workload: dict[str, Any]) -> None:
    """Compare the timings of all requests with the right ones, also while they are open."""
    check = run_history if "events" in workload else run_served
    try:
        check(student, workload, True)
    except Broken as wrong:
        if wrong.cause == "misses":
            try:
                check(student, workload, False)
            except Exception:
                raise wrong from None
            wrong.cause, wrong.seen = "asking", f"{wrong.seen} Without calls of `timing` before, it is right."
        raise


def run_served(student: Student, workload: dict[str, Any], ask: bool) -> None:
    """Serve a workload, and compare the timings. ``ask``: also those of open requests, after each step."""
    meter, truth = serve(student, workload, ask)
    timings = {timing.uid: timing for timing in meter.ended}
    for uid in truth.arrived:
        if uid not in timings:
            aborted = not truth.tokens.get(uid)
            seen = f"The request ended{' without a token, because it was aborted,' * aborted} and has no timing."
            raise Broken("lost", "Every request that ends has a timing in `ended`.", seen, request=uid)
        truth.judge(uid, timings[uid].ttft, list(timings[uid].gaps))
    if len(meter.ended) != len(truth.arrived):
        seen = f"{len(truth.arrived)} requests ended, and `ended` holds {len(meter.ended)} timings."
        raise Broken("lost", "Every request that ends has one timing in `ended`.", seen)


def run_history(student: Student, workload: dict[str, Any], ask: bool) -> None:
    """Call the hooks of one meter, or of two that know nothing of each other, and compare all timings."""
    if len(workload["events"]) > 4_000 and student.by_messages:
        return  # that many requests take too long as messages
    workload = {**workload, "ask": ask and workload["ask"]}
    try:
        play_history(student, workload)
    except (Broken, LookupError) as wrong:
        if workload["meters"] > 1:
            try:
                play_history(student, {**workload, "meters": 1})
            except Exception:
                raise wrong from None
            seen = f"The same hook calls were right for a meter alone. {getattr(wrong, 'seen', repr(wrong))}"
            raise Broken("shared", "Each server has its own meter.", seen) from wrong
        raise


def play_history(student: Student, workload: dict[str, Any]) -> None:
    """Apply the events of a history to its meters, in turns, and compare the timings with the right ones."""
    made = [observer(student, "ended") for _ in range(workload["meters"])]
    start = 0.0 if workload.get("zero") else START
    stages = [(meter, Stage(manager, 1 + i, start)) for i, (meter, manager) in enumerate(made)]
    summaries: list[Broken | None] = []
    held: list[tuple[Any, list[float]]] = []  # timings that `timing` returned, and their gaps at that time
    for event in workload["events"]:
        for _, stage in stages:
            stage.apply(event)
        for meter, stage in stages:
            for uid in stage.open if workload["ask"] and hasattr(meter, "timing") else ():
                for _ in range(2):  # asking changes nothing
                    timing = timing_of(meter, uid, bool(stage.open[uid].tokens))
                    judge(uid, stage.open[uid], timing.ttft, list(timing.gaps))
                held.append((timing, list(timing.gaps)))
        if len(workload["events"]) < 12:
            summaries += [check_summaries(meter, stage) for meter, stage in stages]
    for timing, gaps in held:
        if list(timing.gaps) != gaps:
            seen = f"`timing` returned {amount(len(gaps), 'gap')}. Later the same object had {len(timing.gaps)}."
            raise Broken("alive", "A timing is that of one moment: it does not change later.", seen, request=timing.uid)
    for meter, stage in stages:
        for uid in stage.open if hasattr(meter, "timing") else ():
            timing = timing_of(meter, uid, bool(stage.open[uid].tokens))
            judge(uid, stage.open[uid], timing.ttft, list(timing.gaps))
        ended, right = list(meter.ended), [uid for uid, _ in stage.ended]
        if [timing.uid for timing in ended] != right[-KEPT:]:
            seen = f"The requests {_named(right)} ended, in this order; `ended` holds {_named([t.uid for t in ended])}."
            raise Broken("lost", "`ended` holds one timing of each request, in the order of their ends.", seen)
        for timing, (uid, record) in zip(ended, stage.ended, strict=True):
            judge(uid, record, timing.ttft, list(timing.gaps))
        summaries.append(check_summaries(meter, stage))
    if wrong := next(filter(None, summaries), None):  # wrong timings come first
        raise wrong


def check_summaries(meter: Any, stage: Stage) -> Broken | None:
    """Compare the meter's samples on /metrics with those of the ended requests. A median may be rounded up or down.

    A meter without samples of these names is not checked here: the gate `metrics` finds that.
    """
    if not hasattr(meter, "minisgl_metrics"):
        return None
    lines = (line.rpartition(" ") for line in str(meter.minisgl_metrics()).splitlines() if not line.startswith("#"))
    found = {name.strip(): float(value) for name, _, value in lines if name}
    records = [record for _, record in stage.ended[-KEPT:]]
    first = [record.tokens[0] - record.arrived for record in records if record.tokens]
    gaps = [gap for record in records for gap in _gaps(record.tokens)]
    promise = "/metrics has the median, the 99th percentile and the maximum of the requests that have ended."
    is_open = f", and {len(stage.open)} {'is' if len(stage.open) == 1 else 'are'} open"
    ended = f"{amount(len(stage.ended), 'request')} ended{is_open * bool(stage.open)}."
    for name, values in (("ttft_seconds", first), ("inter_token_latency_seconds", gaps)):
        name, ordered = f"minisgl_meter_{name}", sorted(values)
        last = len(ordered) - 1
        right = {f"{name}_count": (len(ordered),) * 2, f"{name}_sum": (sum(ordered),) * 2}
        for quantile in (0.5, 0.99, 1.0) if ordered else ():
            at = quantile * last
            right[f'{name}{{quantile="{quantile}"}}'] = ordered[int(at)], ordered[min(int(at) + 1, last)]
        for sample, (low, high) in right.items():
            got = found.get(sample)
            if got is not None and not low - 1e-6 - 1e-6 * low <= got <= high + 1e-6 + 1e-6 * high:
                shown = (f"{low}", f"{got:g}") if sample.endswith("_count") else apart(low, got)
                seen = f"{ended} `{sample}` should be {shown[0]}, and is {shown[1]}."
                return Broken("summary", promise, seen)
    return None


def _named(uids: Sequence[int]) -> str:
    return ", ".join(map(str, uids[:8])) + (", …" if len(uids) > 8 else "") if uids else "none"


def draw(workload: dict[str, Any]) -> str:
    """Describe a workload, or a history of hook calls."""
    return show_history(workload) if "events" in workload else show(workload)


def kept(meter: Any, computed: bool = False) -> Counter[str]:
    """Return the number of elements in each container of the meter and its file, except ``ended``.

    Arrays do not count if ``ended`` is ``computed``: the meter may free the entries of dropped timings later.
    """
    left_out = ("ended", "ended" + ARRAYS)
    sizes = {name: size for name, size in container_sizes(meter).items() if name not in left_out}
    return Counter({name: size for name, size in sizes.items() if not (computed and name.endswith(ARRAYS))})


def run_kept(student: Student, workload: dict[str, Any]) -> None:
    """Check that the meter, besides its timings in ``ended``, gains fewer entries than there were requests.

    The workload is served twice: a meter may keep room for as many requests as were open at a time.
    """
    meter, truth = serve(student, workload)
    if computes_ended(meter):
        return  # `run_lives` checks this meter
    before, ended = kept(meter), len(truth.arrived)
    again = {**workload, "jobs": [{**job, "id": job["id"] + 1_000_000} for job in workload["jobs"]]}
    run_again(meter, truth, again)
    left = kept(meter) - before
    if left.total() >= ended:
        where = ", ".join(f"{n} in {name}" for name, n in left.items())
        requests = "1 more request has ended" if ended == 1 else f"{ended} more requests have ended"
        seen = f"{requests}, and the meter keeps more entries than before: {where}."
        raise Broken("keeps", "The meter's memory does not grow with the number of ended requests.", seen)


def run_again(meter: Any, first: Truth, workload: dict[str, Any]) -> None:
    """Serve another workload with a meter that has served one. The workload's requests have other uids."""
    truth = Truth(meter, first.host, workload)
    truth.asks = False
    with no_lookahead() if workload["tight"] else nullcontext():
        run(truth.drive, workload)


def run_long(student: Student) -> None:
    """Check that `ended` drops the oldest timings, while requests of few tokens end. No engine runs, only hooks.

    `ended` is read several times before it is full and afterwards, each time after another number of requests.
    """
    meter, manager = observer(student, "ended")
    zero, one, many, calls = np.zeros(1, np.int32), np.ones(1, np.int32), KEPT + 2_345, []
    for uid in range(many):
        req = Req(uid, zero, SamplingParams(max_tokens=1), uid)
        step = Step(uid, zero, zero, one, one, 0, 0, zero, (zero, zero, zero))
        result, record = StepResult(uid, zero[None], one), short_answer(uid)
        calls.append(("minisgl_request_added", {"req": req, "now": record.arrived}))
        for now in record.tokens:
            calls.append(("minisgl_batch_scheduled", {"step": step, "reqs": [req], "now": now}))
            calls.append(("minisgl_step_finished", {"result": result, "reqs": [req], "now": now}))
        calls.append(("minisgl_request_finished", {"req": req, "now": float(uid + 1)}))
        done = uid + 1
        if len(calls) >= 400 or done == many:
            call_hooks(manager, calls)
            calls.clear()
            if done % 700 == 0 or done == many:
                check_full(meter, done)


def short_answer(uid: int) -> Record:
    """Return the times of request ``uid`` of `run_long`, which has no token, one, or two."""
    return Record(float(uid), [uid + uid % 7 / 8, uid + 0.875][: (1, 1, 0, 2)[uid % 4]])


LONG, TOKENS = 100, 2_000
"""In each round of `run_growth`, that many requests run together, and each gets that many tokens."""


def run_growth(student: Student) -> None:
    """Check that the meter frees the gaps of timings that `ended` has dropped, wherever it keeps them.

    In each of two rounds, a few requests gain many tokens, and then `KEPT` requests without a token end. The bytes that
    are allocated after the rounds are compared, so a meter may keep its largest arrays, and free a few gaps later.
    """
    if student.by_messages:
        return  # that many tokens take too long as messages
    meter, manager = observer(student, "ended")
    hook, kept_bytes = manager.hook, []
    none, ones, params = np.zeros(0, np.int32), np.ones(LONG, np.int32), SamplingParams(max_tokens=1)
    reqs = [Req(uid, none, params, uid) for uid in range(2 * (KEPT + LONG))]
    with traced(meter) as allocated:
        for turn in range(2):
            some = reqs[turn * (KEPT + LONG) :][: KEPT + LONG]
            long, now = some[:LONG], 1e6 * turn
            for req in long:
                hook.minisgl_request_added(req=req, now=now)
            for number in range(turn * TOKENS, (turn + 1) * TOKENS):
                now += 1.25
                step = Step(number, ones, ones, ones, ones, LONG, 0, ones, (none, none, none))
                hook.minisgl_batch_scheduled(step=step, reqs=long, now=now)
                hook.minisgl_step_finished(result=StepResult(number, ones[:, None], ones), reqs=long, now=now)
            for req in long:
                hook.minisgl_request_finished(req=req, now=now)
            for req in some[LONG:]:
                hook.minisgl_request_added(req=req, now=now)
                hook.minisgl_request_finished(req=req, now=now)
            gc.collect()
            kept_bytes.append(allocated())
    grown = kept_bytes[1] - kept_bytes[0]
    if grown >= LONG * TOKENS:
        seen = f"{LONG} requests with {TOKENS:,} tokens each ended, and then {KEPT:,} requests without a token. "
        seen += f"After the same calls for other requests, the meter keeps {grown / 1e6:.1f} MB more."
        raise Broken("keeps", "The meter's memory does not grow with the tokens of dropped timings.", seen)


def check_full(meter: Any, done: int) -> None:
    """Check that `ended` holds the last KEPT of the requests 0 to ``done`` - 1, which have ended in this order."""
    uids = [timing.uid for timing in meter.ended]
    promise = f"`ended` holds the timings of the last KEPT = {KEPT:,} requests: the oldest are dropped."
    if len(uids) >= done > KEPT:
        raise Broken("keeps", promise, f"{done} requests have ended, and `ended` holds all their timings.")
    if uids != list(range(max(done - KEPT, 0), done)):
        seen = (
            f"The requests 0 to {done - 1} have ended, in this order. `ended` holds {len(uids):,} timings, of the "
            f"requests {_named(uids[:3])} at the beginning and {_named(uids[-3:])} at the end."
        )
        raise Broken("lost" if len(uids) < min(done, KEPT) else "newest", promise, seen)
    for timing in meter.ended:
        judge(timing.uid, short_answer(timing.uid), timing.ttft, list(timing.gaps))


LIVES: dict[str, list[list[Any]]] = {
    "were aborted before their first token": [["finish", 1, 0, 2]],
    "had one token": [["step", 1, [[0, 0]]], ["finish", 1, 0, 1]],
    "ended with an error after a chunk of the prompt": [["step", 1, [[0, 1]]], ["finish", 1, 0, 3]],
    "were retracted before their first token, and aborted": [["retract", 1, 0], ["finish", 1, 0, 2]],
    "were retracted after a token, and went on": [
        ["step", 1, [[0, 0]]], ["retract", 1, 0], ["step", 1, [[0, 1]]], ["step", 1, [[0, 0]]], ["finish", 1, 0, 0]
    ],
    "had a token in flight at their end, which was discarded": [
        ["step", 1, [[0, 0]]], ["finish", 1, 0, 0], ["step", 1, [[0, 2]]]
    ],
}  # fmt: skip
"""What happens to a request, in words → its events, with the number of the request 0."""


def events_of(uid: int, life: list[list[Any]]) -> Iterator[list[Any]]:
    """Return the events of a request that lives as the request 0 in ``life``."""
    for kind, wait, *args in [["add", 1, 0], *life]:
        yield [kind, wait, *([[[uid, row[1]] for row in args[0]]] if kind == "step" else [uid, *args[1:]])]


def run_lives(student: Student, number: int = 40) -> None:
    """Check that the meter keeps nothing of requests that lived and ended in one way, one after another."""
    full: Full | None = None
    unused = [Req(0, np.zeros(1, np.int32), SamplingParams(max_tokens=1), 0)]
    for turn, (what, life) in enumerate(LIVES.items(), 1):
        meter, manager = observer(student, "ended")
        computed = computes_ended(meter)
        stage, before = Stage(manager), kept(meter, computed)
        for uid in range(10_000 * turn, 10_000 * turn + number):  # numbers that no earlier run had
            for event in events_of(uid, life):
                stage.apply(event)
                if uid in stage.open and hasattr(meter, "timing"):
                    timing_of(meter, uid, bool(stage.open[uid].tokens))
        left = kept(meter, computed) - before
        if left.total() >= number and computed:
            full = full or Full(student)
            left = full.growth(life, number)
        if left.total() >= number:
            where = ", ".join(f"{n} in {name}" for name, n in left.items())
            seen = f"{number} requests {what}, and the meter still keeps entries: {where}."
            raise Broken("keeps", "The meter's memory does not grow with the number of ended requests.", seen)
        reqs = list(stage.reqs.values())
        stage.reqs.clear()
        gc.collect()
        # Only the lists `reqs` and `unused` refer to these requests, if the meter does not.
        held = sum(sys.getrefcount(reqs[i]) > sys.getrefcount(unused[0]) for i in range(number))
        if held and not student.by_messages:  # by messages, the grader itself refers to them
            seen = f"{number} requests {what}, and the meter still refers to the object `req` of {held} of them."
            raise Broken("keeps", "The meter keeps nothing of an ended request except its timing.", seen)


def computes_ended(meter: Any) -> bool:
    """Return whether `ended` is a property: then the timings are in other containers of the meter."""
    return isinstance(getattr(type(meter), "ended", None), property) or meter.ended is not meter.ended


class Full:
    """A meter whose `ended` has as many timings as it may hold, so that its containers do not grow any more."""

    def __init__(self, student: Student):
        self.meter, manager = observer(student, "ended")
        self.stage, self.uid = Stage(manager), 0
        self.growth(max(LIVES.values(), key=len), KEPT)

    def growth(self, life: list[list[Any]], number: int) -> Counter[str]:
        """Return how many elements each container gains while ``number`` requests live and end."""
        before = kept(self.meter, computed=True)
        for uid in range(self.uid, self.uid + number):
            for event in events_of(uid, life):
                self.stage.apply(event)
        self.uid += number
        return kept(self.meter, computed=True) - before


def try_kept(student: Student) -> str:
    """Search for a workload after which the meter keeps too much, between other runs (not in a replay)."""
    if student.replay is None:
        run_lives(student)
    note = search(make_kept, run_kept, seconds=0.6, show=show)(student)
    if student.replay is None:
        run_long(student)
        run_growth(student)
    return note


def make_kept(rng: random.Random, size: int) -> dict[str, Any]:
    """Return a random workload. In half of them every request is aborted at once, without a token."""
    workload = random_run(rng, size)
    if rng.random() < 0.5:
        for job in workload["jobs"]:
            job["abort"] = 0
    return workload


def queue(student: Student) -> str:
    """Check in exact numbers that queueing raises a request's time to first token and none of its gaps.

    Two requests are served with ``max_running_requests`` 2 and then 1.
    """
    timings = []
    for slots in (2, 1):
        workload = _few(_client(1, 4, 6), _client(2, 4, 6), slots=slots)
        meter, manager = observer(student, "ended")
        truth = Truth(meter, manager, workload)
        truth.time = float  # type: ignore[method-assign, assignment]
        run(truth.drive, workload)
        timings.append(next((t for t in meter.ended if t.uid == 2), None))
    alone, queued = timings
    if alone is None or queued is None:
        raise Invalid
    expected = ((0.0, 1.0), (6.0, 1.0))
    seen = tuple((t.ttft, max(t.gaps, default=None)) for t in (alone, queued))
    if seen != expected:
        text = (
            f"With max_running_requests 2 and 1, (time to first token, worst gap) of request 2 should be {expected}; "
            f"the meter says {seen}."
        )
        raise Broken("first-token", "Queueing raises the time to first token, and no gap.", text)
    return "a request that queues for 6 steps: time to first token 0 -> 6 steps, longest gap 1 -> 1 step"


def metrics(served: Served) -> str:
    """Check that the meter's samples on /metrics include the requests of the gate that ran before this one."""
    assert served.server is not None
    found = served.server.metrics()
    ttft = found.get("minisgl_meter_ttft_seconds_count", 0.0)
    gaps = found.get("minisgl_meter_inter_token_latency_seconds_count", 0.0)
    if ttft < 9 or gaps < 9:
        seen = f"Nine requests were answered; /metrics counts {ttft:.0f} first tokens and {gaps:.0f} gaps."
        raise Broken("lost", "/metrics shows the timings of all requests that have ended.", seen)
    return f"/metrics counts {ttft:.0f} first tokens and {gaps:.0f} gaps"


HOOKS = ["minisgl_request_added", "minisgl_step_finished", "minisgl_request_finished"]

GATES = (
    Gate(
        "clock",
        "each timing is exact on a simulated clock",
        search(make, run_clock, seconds=1.5, at_least=len(FIRST) + len(large_histories()) + RANDOM, show=draw),
        part="meter.clock",
    ),
    Gate("kept", "the meter keeps nothing of ended requests except their timings", try_kept, limit=20.0),
    Gate("queue", "queueing increases the time to first token, but no gap", queue),
    facts(HOOKS[:2]),
    Gate("metrics", "/metrics shows the timings", metrics, served=True),
)


MOST_BYTES = 4


def measure_stretch(student: Student) -> tuple[str, bool]:
    """Measure the memory that the student's meter keeps for each token."""
    kept, right = measure_memory(student)
    counted = f"{kept} bytes a token" + ("" if right else ", but some timings are wrong")
    return counted, right and kept <= MOST_BYTES


STRETCH = Stretch(
    f"While {ROWS} requests run at a time, and {REQUESTS} in all, `meter` keeps 33 bytes for each token, also of the "
    f"requests that have ended (`ended` may be a property). Keep at most {MOST_BYTES}, and all timings as exact as "
    "before.",
    measure_stretch,
)
