"""Measures how many bytes a student's meter keeps for each token that its requests gained. No engine runs, only hooks.

At any time `ROWS` requests run, and every step gives each of them a token, as in a server under load.
"""

from __future__ import annotations

import gc
import random
from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from minisgl.chapters.lab.grader.gate import Student
from minisgl.chapters.lab.grader.held import traced
from minisgl.chapters.lab.grader.observers import observer
from minisgl.core import Req, SamplingParams, Step, StepResult

__all__ = ["ROWS", "measure_memory"]

ROWS, REQUESTS = 16, 200
"""How many requests run at a time, and how many end in all. Their answers have 64 to 192 tokens."""

_NONE, _ONES = np.zeros(0, np.int32), np.ones(ROWS, np.int32)


@dataclass
class Turn:
    """The hook calls of one step of the scheduler. All of them get the step's time."""

    added: list[Req] = field(default_factory=list)
    rows: list[Req] = field(default_factory=list)
    gained: list[Req | None] = field(default_factory=list)
    """For each row, its request if the row gained a token, otherwise None."""
    finished: list[Req] = field(default_factory=list)


def measure_memory(student: Student) -> tuple[int, bool]:
    """Return the bytes that the meter keeps for each token, rounded, and whether all timings in ``ended`` are right."""
    meter, manager = observer(student, "ended")
    turns = make_turns(random.Random(0))
    steps = [step_of(i, turn) for i, turn in enumerate(turns)]
    gc.collect()
    with traced(meter) as allocated:
        before = allocated()
        for i, (turn, (step, result)) in enumerate(zip(turns, steps, strict=True)):
            call(manager.hook, turn, step, result, seconds(i))
        gc.collect()
        kept = allocated() - before
    truth = timings(turns)
    tokens = sum(len(gaps) + 1 for _, _, gaps in truth)
    return round(kept / tokens), [(t.uid, t.ttft, list(t.gaps)) for t in meter.ended] == truth


def seconds(turn: int) -> float:
    """Return the time of a step in seconds. It needs all digits of a float64."""
    return 86_400.1 + turn * 0.0123456789 + turn * 40503 % 256 / 70_000


def make_turns(rng: random.Random) -> list[Turn]:
    """Return the steps from the arrival of the first request to the end of the last.

    The first step of a request computes a chunk that does not end its prompt, so the request gains no token.
    """
    waiting = deque(Req(uid, _ONES[:1], SamplingParams(max_tokens=1), uid) for uid in range(1000, 1000 + REQUESTS))
    running: dict[int, tuple[Req, int]] = {}  # uid -> the request, and how many steps it needs
    turns: list[Turn] = []
    while waiting or running:
        turn = Turn()
        while waiting and len(running) < ROWS:
            req = waiting.popleft()
            turn.added.append(req)
            running[req.uid] = req, rng.randint(64, 192) + 1
        for req, left in list(running.values()):
            turn.rows.append(req)
            turn.gained.append(None if req in turn.added else req)
            running[req.uid] = req, left - 1
            if left == 1:
                turn.finished.append(req)
                del running[req.uid]
        turns.append(turn)
    return turns


def step_of(number: int, turn: Turn) -> tuple[Step, StepResult]:
    """Return a step with the turn's rows, and its result."""
    n, ones = len(turn.rows), _ONES[: len(turn.rows)]
    sampled = np.array([req is not None for req in turn.gained], np.int32)
    step = Step(number, ones, ones, ones, sampled, n, 0, ones, (_NONE, _NONE, _NONE))
    return step, StepResult(number, ones[:, None], sampled)


def call(hook: Any, turn: Turn, step: Step, result: StepResult, now: float) -> None:
    """Call the hooks of one step, in the order in which the scheduler calls them."""
    for req in turn.added:
        hook.minisgl_request_added(req=req, now=now)
    hook.minisgl_batch_scheduled(step=step, reqs=turn.rows, now=now)
    hook.minisgl_step_finished(result=result, reqs=turn.gained, now=now)
    for req in turn.finished:
        hook.minisgl_request_finished(req=req, now=now)


def timings(turns: list[Turn]) -> list[tuple[int, float, list[float]]]:
    """Return the right timings in the order of the ends: the uid, the time to first token, and the gaps."""
    arrived: dict[int, float] = {}
    times: dict[int, list[float]] = {}
    ended = []
    for i, turn in enumerate(turns):
        for req in turn.added:
            arrived[req.uid], times[req.uid] = seconds(i), []
        for gained in turn.gained:
            if gained is not None:
                times[gained.uid].append(seconds(i))
        for req in turn.finished:
            each = times[req.uid]
            ended.append((req.uid, each[0] - arrived[req.uid], [b - a for a, b in pairwise(each)]))
    return ended
