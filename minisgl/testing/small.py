"""A small engine and small clients: what a test of the scheduler begins with.

Knows `Drive`; what a run must come to is each test's own.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

from minisgl.core import EngineSpec, SamplingParams
from minisgl.scheduler.base import SchedulerPolicy
from minisgl.scheduler.cache_manager import CacheManager
from minisgl.testing.drive import Drive, Job, make_plugin

__all__ = ["SPEC", "job", "make", "pool", "tight"]

SPEC = EngineSpec(page_size=4, num_pages=30, max_running_requests=4, max_seq_len=120, vocab_size=50)


def make(
    policy: str | SchedulerPolicy = "mixed", cache: str = "radix", spec: EngineSpec = SPEC, **options: Any
) -> Drive:
    """A `Drive` of built-in plugins by name (or of a policy object) on ``spec``; ``options`` are `Drive`'s."""
    chosen = make_plugin("scheduler", policy) if isinstance(policy, str) else policy
    return Drive(spec, make_plugin("cache", cache, page_size=spec.page_size), chosen, **options)


def job(uid: int, length: int = 9, answer: int = 8, first: int | None = None, **more: Any) -> Job:
    """A greedy request of ``length`` prompt and ``answer`` output tokens; one ``first`` token: they begin alike."""
    start = uid * 7 if first is None else first
    prompt = [(start + i * i) % SPEC.vocab_size for i in range(length)]
    return Job(uid, prompt, SamplingParams(max_tokens=answer, temperature=0.0), **more)


def pool(num_pages: int, page_size: int = 4, slots: int = 4) -> EngineSpec:
    """An engine of that many pages, whose longest sequence fills all of them."""
    return EngineSpec(page_size, num_pages, slots, max_seq_len=num_pages * page_size, vocab_size=SPEC.vocab_size)


def tight() -> Any:
    """A context in which admission leaves no room for what runs: decode runs out of pages."""
    return patch.object(CacheManager, "LOOKAHEAD", 0)
