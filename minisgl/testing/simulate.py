"""Traces of scheduler runs without a model: any requests, on the simulated engine, with any built-in cache and policy.

Figures and tests use these traces where the meaning of the tokens does not matter. `Drive` checks every run.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from minisgl.core import EngineSpec, SamplingParams
from minisgl.scheduler import SchedulerPolicy
from minisgl.testing.drive import Job, make_plugin
from minisgl.testing.traced import traced
from minisgl.trace.read import Trace, read

__all__ = ["greedy", "simulate"]


def simulate(
    jobs: Sequence[Job],
    *,
    policy: str | SchedulerPolicy = "mixed",
    order: str = "fcfs",
    cache: str = "radix",
    page_size: int = 16,
    num_pages: int = 64,
    max_running_requests: int = 16,
    max_seq_len: int | None = None,
    name: str = "run",
    **options: Any,
) -> Trace:
    """Run ``jobs`` on the simulated engine and return the trace.

    ``policy`` and ``cache`` are names of built-in plugins; a policy may also be an object. ``name`` is the trace's file
    name without suffix.
    ``max_seq_len`` is the pool's size in tokens by default. ``options`` are `Drive`'s (``overlap``,
    ``max_prefill_tokens``, …).
    """
    spec = EngineSpec(
        page_size=page_size,
        num_pages=num_pages,
        max_running_requests=max_running_requests,
        max_seq_len=max_seq_len or num_pages * page_size,
        vocab_size=max((max(job.prompt) for job in jobs), default=0) + 2,
    )
    if isinstance(policy, str):
        policy = _policy(policy, order)
    plugins = make_plugin("cache", cache, page_size=page_size), policy
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.jsonl"
        with traced(path, spec, *plugins, thorough=False, **options) as drive:
            drive.run(jobs)
        return read(path)


def _policy(name: str, order: str) -> SchedulerPolicy:
    policy: SchedulerPolicy = make_plugin(
        "scheduler", name, **({} if name in ("static", "priority") else {"order": order})
    )
    return policy


def greedy(uid: int, prompt: Sequence[int], answer: int, arrive: int = 0) -> Job:
    """Build a greedy request with exactly ``answer`` output tokens, sent before step ``arrive``."""
    return Job(uid, list(prompt), SamplingParams(max_tokens=answer, temperature=0.0, ignore_eos=True), arrive)
