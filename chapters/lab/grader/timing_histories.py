"""Histories of hook calls for the gates of lab `meter`: no engine runs, so a history may have any order and any size.

A history is a list of events. Times are in units of 1/256 s, and each event comes ``wait`` units after the one before:
``["add", wait, uid]``, ``["step", wait, rows]`` (``rows`` are ``[uid, what]`` with an index of `WHAT`),
``["many", wait, uid, n]`` (n steps, each with a token of this request), ``["same", wait, uid, n]`` (n such steps whose
results are read at one reading of the clock), ``["retract", wait, uid]``, and
``["finish", wait, uid, reason]`` with an index of `REASONS`. Knows the hooks, and no meter.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from minisgl.chapters.lab.grader.gate import Broken, Invalid
from minisgl.chapters.lab.grader.observers import call_hooks
from minisgl.core import Req, SamplingParams, Step, StepResult
from minisgl.plugin_manager.manager import PluginManager

__all__ = ["START", "Record", "Stage", "large_histories", "make_history", "show_history"]

START = float(1 << 30)
"""The time of step 0. A server's clock has run for years, so a meter with times of 32 bits loses seconds."""
FINE = (1 << 24) + 1
"""A wait, in units of 1/256 s, that a float of 32 bits rounds."""
WHAT = ("gains a token", "computes a chunk of its prompt", "computes a token that is discarded",
        "gains 2 tokens at once", "gains 5 tokens at once")  # fmt: skip
TOKENS = (1, 0, 1, 2, 5)
"""The number of tokens that a row of each kind has sampled."""
REASONS = ("stop", "length", "abort", "error")
LENGTHS = {"add": 3, "step": 3, "many": 4, "same": 4, "retract": 3, "finish": 4}
"""The number of entries of each event."""


@dataclass
class Record:
    """The right times of one request: of its arrival and its tokens, and times that mistakes use instead.

    ``rows`` are the times at which steps with a row of the request were scheduled, ``chunks`` those at which results of
    its rows without a sampled token were read, and ``discarded`` those of its discarded tokens.
    """

    arrived: float
    tokens: list[float] = field(default_factory=list)
    rows: list[float] = field(default_factory=list)
    chunks: list[float] = field(default_factory=list)
    discarded: list[float] = field(default_factory=list)
    retracted: bool = False
    at_once: bool = False
    """Whether a row of the request gained several tokens."""


def _state(req: Req) -> dict[str, Any]:
    """Return the attributes of a request that a plain assignment can change."""
    names = ("uid", "arrival", "priority", "finish_reason", "req_pool_idx", "admission_order")
    return {name: getattr(req, name) for name in names} | {"output_ids": list(req.output_ids)}


class Stage:
    """One meter's plugin manager, and the records of the requests of its hooks.

    ``stretch`` scales all waits. ``start`` is the time of the first event.
    """

    def __init__(self, manager: PluginManager, stretch: int = 1, start: float = START):
        self.manager, self.stretch, self.start = manager, stretch, start
        self.calls: list[tuple[str, dict[str, Any]]] = []  # calls of hooks that were not made yet
        self.time, self.steps = 0, 0
        self.reqs: dict[int, Req] = {}
        self.open: dict[int, Record] = {}
        self.ended: list[tuple[int, Record]] = []

    @property
    def now(self) -> float:
        """The time, in seconds. It has 21 binary places, so that a difference of two times shows a rounding."""
        return self.start + self.time / 256 + self.time * 40503 % 4096 / 2**21

    def apply(self, event: Sequence[Any]) -> None:
        """Call the hooks of one event. Raise `Invalid` if it can't happen."""
        if len(event) != (LENGTHS.get(event[0]) if event else None):
            raise Invalid  # an event that was shrunk
        kind, wait, *args = event
        if wait < 0:
            raise Invalid
        self.time += wait * self.stretch
        getattr(self, kind)(*args)
        self.flush()

    def tell(self, name: str, **arguments: Any) -> None:
        """Call a hook, at the latest when the event ends."""
        self.calls.append((name, arguments))
        if len(self.calls) >= 400:
            self.flush()

    def flush(self) -> None:
        """Call the hooks. Raise `Broken` if the meter changes a list of requests, or a request."""
        gained = [list(arguments["reqs"]) for _, arguments in self.calls if "reqs" in arguments]
        reqs = {id(req): req for some in gained for req in some if req is not None}
        reqs |= {id(arguments["req"]): arguments["req"] for _, arguments in self.calls if "req" in arguments}
        before = {key: _state(req) for key, req in reqs.items()}
        call_hooks(self.manager, self.calls)
        promise = "An observer reads the arguments of its hooks, and changes none."
        if gained != [list(arguments["reqs"]) for _, arguments in self.calls if "reqs" in arguments]:
            raise Broken("changes", promise, "The list `reqs` of a hook was another one after the call.")
        for key, req in reqs.items():
            changed = [name for name, now in _state(req).items() if now != before[key][name]]
            if changed:
                seen = f"A hook of the meter changed `{changed[0]}` of a request."
                raise Broken("changes", promise, seen, request=req.uid)
        self.calls.clear()

    def add(self, uid: int) -> None:
        """Add a request."""
        if uid in self.reqs or uid < 0:
            raise Invalid
        self.reqs[uid] = Req(uid, np.zeros(1, np.int32), SamplingParams(max_tokens=1), uid)
        self.open[uid] = Record(self.now)
        self.tell("minisgl_request_added", req=self.reqs[uid], now=self.now)

    def step(self, rows: Sequence[Sequence[int]], takes: int = 1) -> None:
        """Launch a step and read its result, ``takes`` units later."""
        if not rows or any(len(row) != 2 for row in rows):
            raise Invalid
        uids = [uid for uid, _ in rows]
        if len(set(uids)) < len(uids) or not set(uids) <= set(self.reqs):
            raise Invalid
        if any((uid in self.open) < (what != 2) or not 0 <= what < len(WHAT) for uid, what in rows):
            raise Invalid
        n, number = len(rows), self.steps
        zeros, samples = np.zeros(n, np.int32), np.array([int(what != 1) for _, what in rows], np.int32)
        accepted = np.array([TOKENS[what] for _, what in rows], np.int32)
        step = Step(number, zeros, zeros, np.ones(n, np.int32), samples, 0, 0, zeros, (zeros[:0],) * 3)
        reqs = [self.reqs[uid] for uid in uids]
        for uid in self.open.keys() & set(uids):
            self.open[uid].rows.append(self.now)
        self.tell("minisgl_batch_scheduled", step=step, reqs=reqs, now=self.now)
        self.time += takes * self.stretch
        gained = [self.reqs[uid] if what not in (1, 2) else None for uid, what in rows]
        for uid, what in rows:
            if uid in self.open:
                record = self.open[uid]
                # Tokens that a row gained at once count as one time.
                (record.chunks if what == 1 else record.discarded if what == 2 else record.tokens).append(self.now)
                record.at_once |= TOKENS[what] > 1
                if what not in (1, 2):
                    self.reqs[uid].output_ids.extend([0] * TOKENS[what])
        tokens = np.zeros((n, max(*accepted.tolist(), 1)), np.int32)
        for array in (tokens, accepted, samples, zeros):
            array.setflags(write=False)  # an observer changes no argument
        result = StepResult(number, tokens, accepted)
        self.tell("minisgl_step_finished", result=result, reqs=gained, now=self.now)
        self.steps += 1

    def many(self, uid: int, n: int) -> None:
        """Run n steps with a token of one request."""
        if n < 1:
            raise Invalid
        for i in range(n):
            self.time += i * 40503 % 256 * self.stretch
            self.step([[uid, 0]])

    def same(self, uid: int, n: int) -> None:
        """Run n steps with a token of one request, whose results are read at the same time: a clock is coarse."""
        if n < 1:
            raise Invalid
        for i in range(n):
            self.step([[uid, 0]], takes=int(i == 0))

    def retract(self, uid: int) -> None:
        """Retract a request."""
        if uid not in self.open:
            raise Invalid
        self.open[uid].retracted = True
        self.tell("minisgl_request_retracted", req=self.reqs[uid], step=self.steps)

    def finish(self, uid: int, reason: int) -> None:
        """End a request."""
        if uid not in self.open or not 0 <= reason < len(REASONS):
            raise Invalid
        self.reqs[uid].finish_reason = REASONS[reason]  # type: ignore[assignment]
        self.ended.append((uid, self.open.pop(uid)))
        self.tell("minisgl_request_finished", req=self.reqs[uid], now=self.now)


def make_history(rng: random.Random, size: int) -> dict[str, Any]:
    """Return a random history of a few requests, whose uids begin at ``first``.

    ``meters`` is the number of meters that get it, each with its own clock. ``ask``: open timings are read after each
    event. ``zero``: the clock begins at 0.
    """
    first, most, apart = rng.choice([0, 0, 1, 2**33]), rng.randint(1, 4), rng.choice([1, 1, 2**32])
    events: list[list[Any]] = []
    known: list[int] = []
    running: list[int] = []
    for _ in range(3 + min(size, 30)):
        wait, kind = rng.choice([0, 0, 1, 3, 256, 1000]), rng.random()
        if not running or (kind < 0.2 and len(running) < most):
            known.append(first + len(known) * apart)
            running.append(known[-1])
            events.append(["add", wait, known[-1]])
        elif kind < 0.3:
            events.append(["finish", wait, running.pop(rng.randrange(len(running))), rng.randrange(len(REASONS))])
        elif kind < 0.37:
            events.append(["retract", wait, rng.choice(running)])
        elif kind < 0.42:
            events.append(["same", wait, rng.choice(running), rng.randint(2, 3)])
        else:
            some = rng.sample(known, rng.randint(1, min(len(known), 4)))
            rows = [[uid, rng.choice([0, 0, 0, 1, 2, 3, 4]) if uid in running else 2] for uid in some]
            events.append(["step", wait, rows])
    return {"events": events, "meters": rng.randint(1, 2), "ask": rng.randint(0, 1), "zero": rng.randint(0, 1)}


def large_histories() -> list[dict[str, Any]]:
    """Return histories that random ones seldom reach.

    They have requests that are open while others end, one clock time for several tokens, 10,500 tokens, 1,100 requests
    that run, 4,200 open requests, and waits that 32 bits can't hold exactly.
    """
    uids, queue = range(1_100), range(4_200)
    batch = [["step", 5, [[uid, int((uid + turn) % 5 == 0)] for uid in uids]] for turn in range(4)]
    ends = [["finish", 1, uid, 0] for uid in (*range(0, 1_100, 2), *range(1, 1_100, 2))]
    return [
        {"events": [["add", 0, 1], ["add", 1, 2], ["step", 7, [[1, 0], [2, 1]]], ["step", 5, [[1, 0], [2, 0]]],
                    ["step", 900, [[1, 0], [2, 0]]], ["finish", 1, 2, 0], ["step", 3, [[1, 0]]], ["add", 1, 3],
                    ["finish", 4, 3, 2]], "meters": 1, "ask": 1},
        {"events": [["add", 0, 1], ["same", 9, 1, 3], ["finish", 1, 1, 0]], "meters": 1, "ask": 1},
        {"events": [["add", 0, 1], ["many", 9, 1, 10_500], ["finish", 1, 1, 0]], "meters": 1, "ask": 0},
        {"events": [*(["add", 1, uid] for uid in uids), *batch, *ends], "meters": 1, "ask": 0},
        {"events": [*(["add", 1, uid] for uid in queue[:40]), ["step", 5, [[uid, uid % 2] for uid in queue[:40]]],
                    *(["add", 1, uid] for uid in queue[40:]), ["step", 5, [[uid, uid % 2] for uid in queue[:40]]],
                    *(["finish", 1, uid, 1] for uid in queue[:40])], "meters": 1, "ask": 0},
        {"events": [["add", 0, 1], *(["step", FINE + i, [[1, 0]]] for i in range(3)), ["finish", 1, 1, 0]],
         "meters": 1, "ask": 0},
    ]  # fmt: skip


def show_history(workload: dict[str, Any]) -> str:
    """Describe a history in a line per event, with the time in seconds from its beginning."""
    time, lines = 0, ["hook calls for two meters, each with its own clock"] if workload["meters"] > 1 else []
    for kind, wait, *args in (event for event in workload["events"] if event and len(event) == LENGTHS.get(event[0])):
        time += wait
        at = f"{time / 256:.4g} s: "
        if kind == "step":
            rows = ", ".join(f"request {uid} {WHAT[what]}" for uid, what in filter(lambda row: len(row) == 2, args[0]))
            time += 1
            lines.append(f"{at}a step is launched; {time / 256:.4g} s: its result is read: {rows}")
        elif kind == "many":
            time += sum(1 + i * 40503 % 256 for i in range(args[1]))
            lines.append(f"{at}request {args[0]} gains {args[1]} tokens, until {time / 256:.4g} s")
        elif kind == "same":
            time += 1
            lines.append(
                f"{(time - 1) / 256:.4g} s: request {args[0]} gains {args[1]} tokens, all at {time / 256:.4g} s"
            )
        elif kind == "finish":
            lines.append(f"{at}request {args[0]} ends ({REASONS[args[1]]})")
        else:
            lines.append(f"{at}request {args[0]} is {'added' if kind == 'add' else 'retracted'}")
    return "\n".join(lines)
