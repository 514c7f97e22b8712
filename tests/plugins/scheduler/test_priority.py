"""`scheduler=priority`: urgent requests go first and take room, and the less urgent ones finish in the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from minisgl.core import EngineSpec, InvalidRequestError, SamplingParams
from minisgl.scheduler.base import Running, SchedulerPolicy, Waiting
from minisgl.scheduler.cache_manager import AdmissionCost
from minisgl.scheduler.planner import StepBudget
from minisgl.testing.drive import Drive, Job, make_plugin
from minisgl.testing.policy import PolicyConformance

SPEC = EngineSpec(page_size=4, num_pages=60, max_running_requests=4, max_seq_len=160, vocab_size=50)
LARGE = EngineSpec(page_size=4, num_pages=640, max_running_requests=64, max_seq_len=512, vocab_size=1000)


def job(
    uid: int, length: int = 9, answer: int = 12, priority: int = 0, arrive: int = 0, first: int | None = None
) -> Job:
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


def crowd(lows: int, urgent_at: int, length: int, shared: bool = False) -> list[Job]:
    """Return ``lows`` less urgent requests, and an urgent one, uid 1000, that arrives later."""
    first = 3 if shared else None
    crowd = [
        job(uid, 20 + 7 * (uid % 9), 20 + 11 * (uid % 7), priority=5, arrive=uid // 64, first=first)
        for uid in range(1, lows + 1)
    ]
    return [*crowd, job(1000, length, 40, priority=-1, arrive=urgent_at, first=first)]


@pytest.mark.parametrize(
    ("lows", "overlap", "cache", "length", "chunk", "starvation_steps", "shared", "urgent_at"),
    [
        (512, True, "radix", 9, 8192, 64, False, 40),
        (192, True, "radix", 200, 64, 512, True, 30),
        (192, True, "naive", 200, 32, 64, False, 70),
        (320, False, "radix", 200, 32, 64, True, 150),
        (192, False, "naive", 9, 64, 512, False, 3),
    ],
)
def test_urgent_request_in_a_crowd(
    lows: int, overlap: bool, cache: str, length: int, chunk: int, starvation_steps: int, shared: bool, urgent_at: int
) -> None:
    """An urgent request gets its first token within 3 steps of what it needs alone. It arrives at a long queue."""
    options: dict[str, Any] = {
        "overlap": overlap,
        "cache": cache,
        "max_prefill_tokens": chunk,
        "starvation_steps": starvation_steps,
        "thorough": False,
    }
    jobs = crowd(lows, urgent_at, length, shared)
    alone = make(LARGE, **options).run([replace(jobs[-1], arrive=0)])
    report = make(LARGE, **options).run(jobs)
    # With a shared prefix, the urgent request may need fewer steps than alone.
    assert report.first_token[1000] - urgent_at - alone.first_token[1000] <= 3
    assert report.counts.admissions[1000] == 1
    assert len(report.finished) == lows + 1
    assert sum(report.first_token[uid] > report.first_token[1000] for uid in range(1, lows + 1)) > 64
    assert all(end.finish_reason == "length" for end in report.finished.values())


# ---- preemption on arrival -----------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [True, False])
def test_a_request_takes_a_row(overlap: bool) -> None:
    """All rows are full: the youngest of the least urgent requests is retracted, once, and continues later."""
    jobs = [job(uid, priority=uid // 3, answer=30) for uid in range(1, 9)]  # 1 and 2: 0; 3 to 5: 1; 6 to 8: 2
    report = make(overlap=overlap).run([*jobs, job(9, priority=0, arrive=10)])
    assert report.counts.admissions == {**dict.fromkeys(range(1, 10), 1), 4: 2}
    assert report.first_token[9] <= 10 + 3
    assert report.first_token[9] < report.first_token[5] <= report.first_token[6]


@pytest.mark.parametrize("overlap", [True, False])
def test_a_request_takes_as_many_pages_as_it_needs(overlap: bool) -> None:
    """The pool holds four short requests. A long urgent one needs half of it, and two are retracted."""
    spec = EngineSpec(page_size=4, num_pages=40, max_running_requests=8, max_seq_len=160, vocab_size=50)
    jobs = [job(uid, length=24, answer=16) for uid in range(1, 5)]
    report = make(spec, overlap=overlap, cache="naive").run([*jobs, job(9, 60, 20, priority=-1, arrive=4)])
    assert report.counts.admissions == {1: 1, 2: 1, 3: 2, 4: 2, 9: 1}
    assert report.first_token[9] <= 4 + 3


def test_without_preemption_it_waits_for_room() -> None:
    jobs = [job(uid, answer=30) for uid in range(1, 9)]
    report = make(preempt=False).run([*jobs, job(9, priority=-1, arrive=10)])
    assert report.retractions == 0
    assert max(report.first_token[uid] for uid in range(1, 5)) < report.first_token[9]
    assert report.first_token[9] <= min(report.first_token[uid] for uid in range(5, 9))


def test_equal_priority_takes_no_room() -> None:
    report = make().run([job(uid, answer=30, priority=3, arrive=uid) for uid in range(1, 13)])
    assert report.retractions == 0


@pytest.mark.parametrize("overlap", [True, False])
def test_a_retracted_request_does_not_take_turns(overlap: bool) -> None:
    """Urgent requests keep coming: at most one request is retracted for each of them."""
    lows = [job(uid, length=20, answer=40, priority=1) for uid in range(1, 13)]
    urgent = [job(100 + i, length=12, answer=5, arrive=5 * i + 5) for i in range(20)]
    report = make(overlap=overlap, starvation_steps=512).run([*lows, *urgent])
    assert report.retractions <= len(urgent)
    assert all(report.first_token[u.uid] - u.arrive <= 4 for u in urgent)


# ---- inversions ------------------------------------------------------------------------------------------------


def test_an_urgent_request_waits_for_no_less_urgent_waiting_one() -> None:
    """A less urgent request with the same prompt came first, and waits: the urgent one computes the prompt."""
    full = [job(uid, answer=40, priority=1) for uid in range(1, 5)]
    same = [job(5, 40, 4, priority=2, first=1), job(6, 40, 4, priority=0, arrive=5, first=1)]
    report = make(max_prefill_tokens=16).run([*full, *same])
    assert report.first_token[6] <= 5 + 3 + 3  # 3 chunks
    assert report.finished[6].cached_tokens == 0
    assert report.finished[5].cached_tokens > 0


def test_a_running_request_inherits_the_urgency_of_one_that_waits_for_its_prefix() -> None:
    """A less urgent request computes the prefix that the urgent one waits for, while others want the step's tokens."""
    spec = EngineSpec(page_size=4, num_pages=400, max_running_requests=8, max_seq_len=400, vocab_size=50)
    low = job(1, 160, 4, priority=5, first=1)
    between = [job(uid, 160, 4, priority=2, arrive=2) for uid in range(2, 6)]
    urgent = job(9, 164, 4, priority=0, arrive=3, first=1)
    report = make(spec, max_prefill_tokens=16).run([low, *between, urgent])
    assert report.first_token[9] <= 3 + 11 + 3  # 164 tokens in chunks of 16
    assert report.finished[9].cached_tokens >= 128
    assert report.first_token[9] < min(report.first_token[uid] for uid in range(2, 6))


# ---- starvation ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("cache", ["radix", "naive"])
def test_promise_6_a_less_urgent_request_finishes_beside_endless_urgent_ones(cache: str, overlap: bool) -> None:
    """Urgent requests fill all rows at all times. The starved request is admitted, and then keeps its row."""
    urgent = [job(uid, 9, 16, priority=-3, arrive=uid) for uid in range(2, 400)]
    report = make(cache=cache, overlap=overlap, starvation_steps=32, max_prefill_tokens=16).run(
        [*urgent, job(1, 60, 30, priority=7, arrive=20)]
    )
    assert report.counts.admissions[1] == 1
    assert 20 + 32 <= report.first_token[1] < max(report.first_token.values()) / 4


def test_promise_6_a_long_queue_does_not_starve_an_urgent_request() -> None:
    """All requests of a long queue have waited for ``starvation_steps``; the urgent one is not retracted for them."""
    lows = [job(uid, 9, 30, priority=1) for uid in range(1, 60)]
    report = make(starvation_steps=16).run([*lows, job(99, 40, 10, arrive=100)])
    assert report.counts.admissions[99] == 1
    assert report.first_token[99] <= 103


# ---- the field -------------------------------------------------------------------------------------------------


def test_a_priority_needs_a_policy_that_uses_it() -> None:
    drive = Drive(SPEC, make_plugin("cache", "radix", page_size=4), make_plugin("scheduler", "mixed"))
    request = job(1, priority=1)
    with pytest.raises(InvalidRequestError, match="does not use priorities") as caught:
        drive.scheduler.add_request(1, request.prompt, request.params)
    assert caught.value.field == "priority"


@pytest.mark.parametrize("priority", [2**31, -(2**31) - 1, 10**30, 1.5, "high", None])
def test_promise_2_a_priority_out_of_range_is_refused(priority: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(priority=priority).check()
    assert caught.value.field == "priority"


def test_the_whole_range_of_priorities_is_ordered() -> None:
    spec = replace(SPEC, max_running_requests=1)
    jobs = [job(1, priority=2**31 - 1), job(2, priority=0), job(3, priority=-(2**31)), job(4, priority=-1)]
    report = make(spec, preempt=False).run(jobs)
    assert sorted(report.first_token, key=lambda uid: report.first_token[uid]) == [3, 4, 2, 1]


def test_slo_makes_room_beside_the_requests_it_admits() -> None:
    """Request 2 takes the last free row, so the batch request 1 is retracted for request 3 in the same step.

    `Budget.retractions` does not count earlier grants of the step, so it must get request 2 too.
    """
    asked: list[list[int]] = []

    def retractions(order: Sequence[int]) -> list[int]:
        asked.append(list(order))
        return [1] if order == [2, 3, 1] else []

    running = [Running(1, 0, 0, 0, 1, priority=1, arrival=1)]
    waiting = [Waiting(uid, uid, 10, 0, None, 0) for uid in (2, 3)]
    budget = StepBudget(64, 1, 100, 0, lambda _: AdmissionCost(1, 0), None, retractions)
    plan = make_plugin("scheduler", "slo").plan(waiting, running, budget)
    assert list(plan.retract) == [1] and dict(plan.rows) == {2: 10, 3: 10}, asked
