"""`scheduler=priority`: urgent requests go first and take room, and the less urgent ones finish in the end."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from minisgl.core import EngineSpec, SamplingParams
from minisgl.scheduler.base import SchedulerPolicy
from minisgl.testing.drive import Drive, Job, make_plugin
from minisgl.testing.policy import PolicyConformance

SPEC = EngineSpec(page_size=4, num_pages=60, max_running_requests=4, max_seq_len=160, vocab_size=50)
LARGE = EngineSpec(page_size=4, num_pages=640, max_running_requests=64, max_seq_len=512, vocab_size=1000)


def job(uid: int, length: int = 9, answer: int = 12, priority: int = 0, arrive: int = 0, first: int | None = None) -> Job:
    start = uid * 7 if first is None else first
    prompt = [(start + i * i) % SPEC.vocab_size for i in range(length)]
    params = SamplingParams(max_tokens=answer, temperature=0.0, ignore_eos=True, priority=priority)
    return Job(uid, prompt, params, arrive)


def make(spec: EngineSpec = SPEC, cache: str = "radix", preempt: bool = True, **options: Any) -> Drive:
    policy = make_plugin("scheduler", "priority", preempt=preempt)
    return Drive(spec, make_plugin("cache", cache, page_size=spec.page_size), policy, **options)


class TestPriority(PolicyConformance):
    def make(self) -> SchedulerPolicy:
        policy: SchedulerPolicy = make_plugin("scheduler", "priority")
        return policy


class TestPriorityWithoutPreemption(PolicyConformance):
    def make(self) -> SchedulerPolicy:
        policy: SchedulerPolicy = make_plugin("scheduler", "priority", preempt=False)
        return policy


# ---- seen to work ------------------------------------------------------------------------------------------


def crowd(urgent_at: int, length: int, shared: bool = False) -> list[Job]:
    """Return 512 less urgent requests, and an urgent one, uid 1000, that arrives later."""
    first = 3 if shared else None
    lows = [
        job(uid, 20 + 7 * (uid % 9), 20 + 11 * (uid % 7), priority=5, arrive=uid // 64, first=first)
        for uid in range(1, 513)
    ]
    return [*lows, job(1000, length, 40, priority=-1, arrive=urgent_at, first=first)]


@pytest.mark.parametrize(
    ("overlap", "cache", "length", "chunk", "starvation_steps", "shared", "urgent_at"),
    [
        (True, "radix", 9, 8192, 64, False, 40),
        (True, "radix", 200, 64, 512, True, 30),
        (True, "naive", 200, 32, 64, False, 70),
        (False, "radix", 200, 32, 64, True, 150),
        (False, "naive", 9, 64, 512, False, 3),
    ],
)
def test_urgent_request_in_a_crowd(
    overlap: bool, cache: str, length: int, chunk: int, starvation_steps: int, shared: bool, urgent_at: int
) -> None:
    """With 512 less urgent requests, an urgent one gets its first token within 3 steps of what it needs alone."""
    options: dict[str, Any] = {
        "overlap": overlap,
        "cache": cache,
        "max_prefill_tokens": chunk,
        "starvation_steps": starvation_steps,
        "thorough": False,
    }
    jobs = crowd(urgent_at, length, shared)
    alone = make(LARGE, **options).run([replace(jobs[-1], arrive=0)])
    report = make(LARGE, **options).run(jobs)
    # With a shared prefix, the urgent request may need fewer steps than alone.
    assert report.first_token[1000] - urgent_at - alone.first_token[1000] <= 3
    assert report.counts.admissions[1000] == 1
    assert len(report.finished) == 513
    assert all(end.finish_reason == "length" for end in report.finished.values())
