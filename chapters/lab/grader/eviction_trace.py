"""A fixed trace in which LRU eviction is poor: questions about a few handbooks, between long prompts that never recur.

A long prompt uses most of the pool for a moment, so the least recently used pages, those of the handbooks, are evicted
for pages that no other request needs. The trace measures a cache with an order of its own.
"""

from __future__ import annotations

import random
from typing import Any

from minisgl.chapters.lab.grader.gate import Student
from minisgl.chapters.lab.grader.simulated_workloads import jobs_of, simulate
from minisgl.testing.drive import make_plugin

__all__ = ["OPTION", "OWN", "cached_tokens"]

OPTION, OWN = "eviction", "own"
"""The trace runs with the option ``eviction=own`` if the student's cache has an option of this name."""
PAGE, PAGES = 16, 200
"""Tokens of a page, and pages of the pool."""


def cached_tokens(student: Student) -> tuple[int, int]:
    """Return how many prompt tokens of the trace were found in the student's cache, and the number of prompt tokens.

    Raise `Broken` if the cache breaks a promise of the engine.
    """
    options = {OPTION: OWN} if OPTION in student.options() else {}
    cache = student.make(student.config(**options), page_size=PAGE)
    workload = make_trace(random.Random(0))
    report = simulate(workload, cache, make_plugin("scheduler", "mixed", order="fcfs"), thorough=True)
    return report.cached_tokens, sum(len(job.prompt) for job in jobs_of(workload))


def make_trace(rng: random.Random) -> dict[str, Any]:
    """Return the trace: every third request has a long prompt, the others one of four handbooks of 384 tokens."""
    jobs = []
    for i in range(60):
        long = {"stem": 0, "shared": 0, "own": rng.randint(800, 1400)}
        short = {"stem": rng.randrange(4), "shared": 384, "own": rng.randint(8, 40)}
        jobs.append({"id": i + 1, **(long if i % 3 == 2 else short), "answer": rng.randint(4, 12), "arrive": 6 * i})
    return {"page_size": PAGE, "pages": PAGES, "slots": 4, "chunk": 512, "jobs": jobs}
