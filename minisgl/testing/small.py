"""A small engine specification and short requests for tests of the scheduler.

The tests run them on `minisgl.testing.drive.Drive`, or with `serve`, and check the outcome themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

from minisgl.core import EngineSpec, SamplingParams
from minisgl.scheduler.base import SchedulerPolicy
from minisgl.scheduler.request_table import Reserve
from minisgl.scheduler.scheduler import Scheduler
from minisgl.testing.drive import Drive, Job, make_plugin
from minisgl.testing.idle import check_idle

__all__ = ["SPEC", "job", "make", "no_lookahead", "pool", "serve"]

SPEC = EngineSpec(page_size=4, num_pages=30, max_running_requests=4, max_seq_len=120, vocab_size=50)


def make(
    policy: str | SchedulerPolicy = "mixed", cache: str = "radix", spec: EngineSpec = SPEC, **options: Any
) -> Drive:
    """Build a `Drive` on an engine of the sizes ``spec``.

    ``policy`` is the name of a built-in policy or a policy object, ``cache`` the name of a built-in cache. ``options``
    are `Drive`'s.
    """
    chosen = make_plugin("scheduler", policy) if isinstance(policy, str) else policy
    return Drive(spec, make_plugin("cache", cache, page_size=spec.page_size), chosen, **options)


def job(uid: int, length: int = 9, answer: int = 8, first: int | None = None, **more: Any) -> Job:
    """Build a greedy request of ``length`` prompt tokens and ``answer`` output tokens.

    The first prompt token is ``first``, or ``7 * uid``. Requests with the same first token have a common prefix.
    """
    start = uid * 7 if first is None else first
    prompt = [(start + i * i) % SPEC.vocab_size for i in range(length)]
    return Job(uid, prompt, SamplingParams(max_tokens=answer, temperature=0.0), **more)


def serve(scheduler: Scheduler, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[list[int]]:
    """Return the output tokens of each prompt. Afterwards nothing of the requests may be left in the scheduler."""
    outputs: list[list[int]] = [[] for _ in prompts]
    for uid, prompt in enumerate(prompts):
        scheduler.add_request(uid, prompt, params)
    while scheduler.has_work:
        output = scheduler.step()
        for uid, token in zip(output.uids, output.tokens, strict=True):
            outputs[uid].append(token)
    check_idle(scheduler)
    return outputs


def pool(num_pages: int, page_size: int = 4, max_running_requests: int = 4) -> EngineSpec:
    """Return the sizes of an engine with ``num_pages`` pages, whose longest sequence fills all of them."""
    return EngineSpec(
        page_size,
        num_pages,
        max_running_requests,
        max_seq_len=num_pages * page_size,
        vocab_size=SPEC.vocab_size,
    )


def no_lookahead() -> Any:
    """Return a context in which admission reserves no pages for the future tokens of requests.

    Decode then runs out of pages, and the scheduler must retract requests.
    """
    return patch.object(Reserve, "num_tokens", 0)
