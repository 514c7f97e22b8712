"""Traces in which LRU eviction is poor: questions about a few handbooks, between long prompts that never recur.

A long prompt uses most of the pool for a moment, so the least recently used pages, those of the handbooks, are evicted
for pages that no other request needs. The traces measure a cache with an order of its own, and are new in each run.
"""

from __future__ import annotations

import random
from typing import Any

from minisgl.chapters.lab.grader.gate import Student
from minisgl.chapters.lab.grader.simulated_workloads import shipped_cache, simulate
from minisgl.testing.drive import make_plugin

__all__ = ["OPTION", "OWN", "times_of_lru"]

OPTION, OWN = "eviction", "own"
"""The traces run with the option ``eviction=own`` if the student's cache has an option of this name."""
PAGE, PAGES = 16, 200
"""Tokens of a page, and pages of the pool."""
TRACES = 3


def times_of_lru(student: Student) -> float:
    """Return how many times as many prompt tokens the student's cache finds as the shipped one, which evicts by LRU.

    Raise `Broken` if the cache breaks a promise of the engine.
    """
    options = {OPTION: OWN} if OPTION in student.options() else {}
    rng, own, lru = student.random, 0, 0
    for _ in range(TRACES):
        workload = make_trace(rng)
        policy = make_plugin("scheduler", "mixed", order="fcfs")
        cache = student.make(student.config(**options), page_size=PAGE)
        own += simulate(workload, cache, policy, thorough=True).cached_tokens
        lru += simulate(workload, shipped_cache("radix", PAGE), policy).cached_tokens
    return own / lru


def make_trace(rng: random.Random) -> dict[str, Any]:
    """Return a trace: every third request has a long prompt, the others one of four handbooks of 384 tokens."""
    jobs = []
    for i in range(60):
        long = {"stem": 0, "shared": 0, "own": rng.randint(800, 1400)}
        short = {"stem": rng.randrange(4), "shared": 384, "own": rng.randint(8, 40)}
        jobs.append({"id": i + 1, **(long if i % 3 == 2 else short), "answer": rng.randint(4, 12), "arrive": 6 * i})
    return {"page_size": PAGE, "pages": PAGES, "slots": 4, "chunk": 512, "jobs": jobs}
