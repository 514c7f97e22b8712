"""Runs on a clock that only counts: the real scheduler without a model, where each step takes a calculated time.

The result of a run has a `RequestRecord` for each request, as a client of a real server measures it, so the metrics
are those of ``bench online``. A run is exact: it has the same result on every machine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from minisgl.bench.clusters.simulate import H200_14B
from minisgl.bench.loadgen.completion import RequestRecord
from minisgl.core import EngineSpec, SamplingParams, Step
from minisgl.plugins.scheduler.guard import StarvationGuard
from minisgl.scheduler import Scheduler
from minisgl.testing.drive import make_plugin
from minisgl.testing.null import NullEngine
from minisgl.testing.replica import StepCost

__all__ = ["TimedJob", "TimedRun", "serve", "step_seconds"]


@dataclass(frozen=True)
class TimedJob:
    """A request that arrives at the time ``at``, in seconds, with ``prompt`` and ``answer`` tokens."""

    uid: int
    at: float
    prompt: int
    answer: int
    priority: int = 0


@dataclass
class TimedRun:
    """The outcome of a run: a record of each request by uid, and the beginning, seconds and tokens of each step."""

    records: dict[int, RequestRecord] = field(default_factory=dict)
    steps: list[tuple[float, float, int]] = field(default_factory=list)
    seconds: float = 0.0
    """When the last request ended."""


def step_seconds(step: Step, cost: StepCost = H200_14B) -> float:
    """Return the calculated time of a step without drafts."""
    rows, starts, tokens = step.num_decode, step.num_computed_tokens, step.num_scheduled_tokens
    return cost.decode(rows, float(starts[:rows].sum() + rows)) + cost.prefill(starts[rows:], tokens[rows:])


def serve(
    jobs: Sequence[TimedJob],
    policy: Any,
    *,
    cost: StepCost = H200_14B,
    max_prefill_tokens: int = 8192,
    max_running_requests: int = 256,
    num_pages: int = 37_500,
    page_size: int = 16,
    starvation_steps: int = 64,
    clients: int | None = None,
    max_steps: int = 100_000,
) -> TimedRun:
    """Serve ``jobs`` with a policy, and return what their clients see.

    The pool of ``num_pages`` pages has no prefix cache. If the policy uses no priorities, requests have none. With
    ``clients``, the load is a closed loop: at most that many requests are open, and the next one of ``jobs`` arrives
    when one ends, whatever its time ``at``. Raise TimeoutError if a request is open after ``max_steps`` steps.
    """
    longest = max(job.prompt + job.answer for job in jobs)
    spec = EngineSpec(page_size, num_pages, max_running_requests, longest, vocab_size=2**31 - 1)
    run, engine, now = TimedRun(), NullEngine(spec), 0.0
    scheduler = Scheduler(
        engine,
        make_plugin("cache", "naive", page_size=page_size),
        StarvationGuard(policy, starvation_steps),
        max_prefill_tokens=max_prefill_tokens,
        overlap=False,
        clock=lambda: now,
    )
    uses_priority = getattr(policy, "uses_priority", False)
    arrivals, num_open = deque(sorted(jobs, key=lambda job: job.at)), 0
    for _ in range(max_steps):
        if not scheduler.has_work:
            if not arrivals:
                return run
            now = max(now, arrivals[0].at) if clients is None else now
        while arrivals and (arrivals[0].at <= now if clients is None else num_open < clients):
            job = arrivals.popleft()
            num_open += 1
            params = SamplingParams(
                max_tokens=job.answer, temperature=0.0, ignore_eos=True, priority=job.priority if uses_priority else 0
            )
            scheduler.add_request(job.uid, np.full(job.prompt, job.uid, np.int32), params)
            start = job.at if clients is None else now
            run.records[job.uid] = RequestRecord(job.uid, job.answer, job.prompt, start=start)
        engine.last = None
        output = scheduler.step()
        if engine.last is not None:
            seconds = step_seconds(engine.last, cost)
            run.steps.append((now, seconds, len(engine.last.input_ids)))
            now += seconds
        for uid in output.uids:
            run.records[uid].times.append(now)
        for end in output.finished:
            run.records[end.uid].end = run.seconds = now
            run.records[end.uid].output_len = end.output_tokens
            num_open -= 1
    left = sorted(uid for uid, record in run.records.items() if not record.end)
    raise TimeoutError(f"{len(left)} requests are open after {max_steps:,} steps, the first one is request {left[0]}")
