"""A conformance kit for scheduling policies: random requests, through the real scheduler, on the simulated engine.

A policy may be slow or unfair. It must not cause a wrong output, must not return many empty plans in a row while the
budget grants tokens, and must depend only on the arguments of ``plan``. The kit uses `minisgl.scheduler.base` and no
shipped policy.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec

from minisgl.core import EngineSpec, SamplingParams
from minisgl.scheduler.base import Budget, Plan, Running, SchedulerPolicy, Waiting
from minisgl.scheduler.planner import StepBudget
from minisgl.testing.drive import Drive, Job, make_plugin

__all__ = ["PlanChecker", "PolicyConformance"]


class PlanChecker:
    """A policy that calls another policy twice with the same arguments, and checks that both plans are equal.

    ``steps`` counts the checked plans. ``plan`` raises AssertionError if a plan has the wrong type, if the two plans
    differ, or after too many empty plans.
    """

    MAX_EMPTY_PLANS = 8
    """A policy fails after this many empty plans in a row, if the budget would have granted tokens each time."""

    def __init__(self, policy: SchedulerPolicy):
        self.policy, self.steps, self.empty_plans = policy, 0, 0
        self.uses_priority: bool = getattr(policy, "uses_priority", False)
        if (victims := getattr(policy, "victims", None)) is not None:
            self.victims: Any = victims

    def plan(self, waiting: Sequence[Waiting], running: Sequence[Running], budget: Budget) -> Plan:
        assert isinstance(budget, StepBudget)
        copy, fresh = budget.copy(), budget.copy()
        plan = self.policy.plan(waiting, running, budget)
        assert isinstance(plan, Plan), f"step {self.steps}: plan() returned {plan!r:.60}, expected a Plan"
        again = self.policy.plan(waiting, running, copy)
        first, second = (list(each.rows) for each in (plan, again))
        assert first == second, (
            f"step {self.steps}: asked twice with equal arguments, plan() returned the rows {first} and then {second}"
        )
        assert list(plan.retract) == list(again.retract), (
            f"step {self.steps}: asked twice with equal arguments, plan() retracts {plan.retract}, then {again.retract}"
        )
        self.steps += 1
        ready: list[Waiting | Running] = [*running, *(w for w in waiting if w.same_prefix_req is None)]
        self.empty_plans = 0 if first or not any(_fits(fresh, view) for view in ready) else self.empty_plans + 1
        assert self.empty_plans < self.MAX_EMPTY_PLANS, (
            f"step {self.steps}: {self.empty_plans} empty plans in a row, although the budget grants a request tokens"
        )
        return plan


def _fits(budget: StepBudget, request: Waiting | Running) -> bool:
    if isinstance(request, Waiting):
        num_tokens = request.num_tokens - request.num_cached_tokens
    else:
        num_tokens = request.num_remaining_tokens or 1
    return budget.grant(request, num_tokens) > 0


class PolicyConformance:
    """The tests that every scheduling policy must pass.

    Subclass it in a test file, give the subclass a name that begins with ``Test``, and implement `make`.
    """

    runs = 40
    """Number of runs with random requests. Later runs have more requests."""
    max_steps = 5_000
    """Steps within which all requests of a run must finish."""

    @property
    def uses_priority(self) -> bool:
        """Whether the policy accepts requests with a priority. Then the random requests have some."""
        return getattr(self.make(), "uses_priority", False)

    def make(self) -> SchedulerPolicy:
        """Build a new object of your policy."""
        raise NotImplementedError("make(self) must return a new object of the policy to test")

    def drive(self, clients: Sequence[Job], spec: EngineSpec, cache: str = "radix", **options: Any) -> PlanChecker:
        """Serve the requests ``clients`` and return the `PlanChecker` around the policy.

        Raise AssertionError if an output is wrong or a request does not finish within ``max_steps`` steps.
        """
        checker = PlanChecker(self.make())
        plugin = make_plugin("cache", cache, page_size=spec.page_size)
        Drive(spec, plugin, checker, thorough=False, **options).run(clients, max_steps=self.max_steps)
        assert checker.steps or not clients, "plan() was never called; expected at least one call"
        return checker

    def test_one_request(self) -> None:
        """A single request finishes with the right tokens, in one chunk or in many."""
        for length, chunk in ((1, 8), (9, 8), (30, 4), (30, 1)):
            self.drive([_job(1, length)], _SPEC, max_prefill_tokens=chunk)

    def test_more_requests_than_rows(self) -> None:
        """14 requests finish with the right tokens if at most 4 can run at a time."""
        clients = [_job(uid, 3 + uid % 5, arrive=uid // 3) for uid in range(1, 15)]
        self.drive(clients, _SPEC)

    def test_shared_prefix(self) -> None:
        """Requests with a common prefix finish with the right tokens."""
        self.drive([_job(uid, 20 + uid, first=0, arrive=uid // 3) for uid in range(1, 9)], _SPEC)

    def test_small_pool(self) -> None:
        """All requests finish with the right tokens if the pool has room for only one of them."""
        spec = EngineSpec(page_size=4, num_pages=10, max_running_requests=4, max_seq_len=40, vocab_size=50)
        self.drive([_job(uid, 25, answer=10) for uid in range(1, 6)], spec, "naive")

    def test_random_requests(self) -> None:
        """Random requests finish with the right tokens.

        The runs have shared prefixes, aborted requests, small pools and chunks of different sizes, with and without
        overlap and a prefix cache.
        """
        for seed in range(self.runs):
            rng = random.Random(seed)
            size, pages = rng.choice([1, 2, 4, 7]), rng.randint(6, 24)
            spec = EngineSpec(size, pages, rng.randint(1, 5), max_seq_len=size * pages, vocab_size=50)
            clients = [_any_job(rng, uid, size * pages) for uid in range(1, 2 + min(seed, 10))]
            if self.uses_priority:
                priorities = rng.choices([-2, -1, 0, 0, 3], k=len(clients))
                clients = [_with_priority(job, p) for job, p in zip(clients, priorities, strict=True)]
            overlap, chunk = rng.random() < 0.5, rng.choice([1, 3, 8, 8192])
            self.drive(clients, spec, rng.choice(["radix", "naive"]), overlap=overlap, max_prefill_tokens=chunk)


_SPEC = EngineSpec(page_size=4, num_pages=40, max_running_requests=4, max_seq_len=160, vocab_size=50)


def _job(uid: int, length: int, answer: int = 6, first: int | None = None, **more: Any) -> Job:
    start = uid * 7 if first is None else first
    prompt = [(start + i * i) % 50 for i in range(length)]
    return Job(uid, prompt, SamplingParams(max_tokens=answer, temperature=0.0), **more)


def _with_priority(job: Job, priority: int) -> Job:
    return replace(job, params=msgspec.structs.replace(job.params, priority=priority))


def _any_job(rng: random.Random, uid: int, room: int) -> Job:
    answer = rng.randint(1, max(room // 3, 1))
    length = rng.randint(1, max(room - answer, 1))
    arrive = rng.choice([0, 0, 1, 4, 9])
    abort = arrive + rng.randint(0, 12) if rng.random() < 0.2 else None
    return _job(uid, length, min(answer, room - length) or 1, rng.choice([0, uid]), arrive=arrive, abort=abort)
