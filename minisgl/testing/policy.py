"""A kit to test scheduling policies with: random clients on the simulated engine, through the real scheduler.

A policy may be slow or unfair by choice; what it may not do is make an answer wrong, stand still, or depend on anything
but what it is shown. Knows `minisgl.scheduler.base` and no policy.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from minisgl.core import EngineSpec, SamplingParams
from minisgl.scheduler.base import Budget, Plan, Running, SchedulerPolicy, Waiting
from minisgl.scheduler.budget import StepBudget
from minisgl.testing.drive import Drive, Job, make_plugin

__all__ = ["PolicyConformance", "Watch"]


class Watch:
    """A policy that asks another, twice the same each time: the answers must be equal. ``steps`` counts them."""

    PATIENCE = 8
    """Empty plans in a row, although something could be computed, before it is called standing still."""

    def __init__(self, policy: SchedulerPolicy):
        self.policy, self.steps, self.idle = policy, 0, 0

    def plan(self, waiting: Sequence[Waiting], running: Sequence[Running], budget: Budget) -> Plan:
        assert isinstance(budget, StepBudget)
        copy, fresh = (
            StepBudget(budget.tokens, budget.rows, budget.pages, budget.reserved_pages, budget.admission_cost)
            for _ in range(2)
        )
        asked = self.policy.plan(waiting, running, budget)
        assert isinstance(asked, Plan), f"step {self.steps}: plan returned {asked!r:.60}, which is no Plan"
        again = self.policy.plan(waiting, running, copy)
        first, second = (list(plan.rows) for plan in (asked, again))
        assert first == second, f"step {self.steps}: asked twice, it answered {first} and then {second}"
        self.steps += 1
        ready: list[Waiting | Running] = [*running, *(w for w in waiting if w.same_prefix_req is None)]
        self.idle = 0 if first or not any(_fits(fresh, view) for view in ready) else self.idle + 1
        assert self.idle < self.PATIENCE, f"step {self.steps}: {self.idle} empty plans in a row, and there is work"
        return asked


def _fits(budget: StepBudget, who: Waiting | Running) -> bool:
    return (
        budget.grant(
            who, who.num_tokens - who.num_cached_tokens if isinstance(who, Waiting) else who.num_remaining_tokens or 1
        )
        > 0
    )


class PolicyConformance:
    """What every scheduling policy must do. Subclass it in a test file, name it ``Test…`` and say how to make yours."""

    runs = 40
    """Random runs, with a growing number of clients."""
    max_steps = 5_000

    def make(self) -> SchedulerPolicy:
        """Your policy, fresh."""
        raise NotImplementedError

    def drive(self, clients: Sequence[Job], spec: EngineSpec, cache: str = "radix", **options: Any) -> Watch:
        """Serve the clients. Raises AssertionError where an answer is wrong, missing or late for ever."""
        watch = Watch(self.make())
        plugin = make_plugin("cache", cache, page_size=spec.page_size)
        Drive(spec, plugin, watch, thorough=False, **options).run(clients, max_steps=self.max_steps)
        assert watch.steps or not clients, "it was never asked"
        return watch

    def test_one_request_is_served(self) -> None:
        for length, chunk in ((1, 8), (9, 8), (30, 4), (30, 1)):
            self.drive([_job(1, length)], _SPEC, max_prefill_tokens=chunk)

    def test_more_requests_than_slots_are_served(self) -> None:
        clients = [_job(uid, 3 + uid % 5, arrive=uid // 3) for uid in range(1, 15)]
        self.drive(clients, _SPEC)

    def test_requests_that_share_a_prefix_are_served(self) -> None:
        self.drive([_job(uid, 20 + uid, first=0, arrive=uid // 3) for uid in range(1, 9)], _SPEC)

    def test_a_pool_that_holds_only_one_of_them_serves_all(self) -> None:
        spec = EngineSpec(page_size=4, num_pages=10, max_running_requests=4, max_seq_len=40, vocab_size=50)
        self.drive([_job(uid, 25, answer=10) for uid in range(1, 6)], spec, "naive")

    def test_any_clients_get_the_right_answers(self) -> None:
        """Shared prefixes, hang-ups, small pools, chunks of every size, with and without overlap and a cache."""
        for seed in range(self.runs):
            rng = random.Random(seed)
            size, pages = rng.choice([1, 2, 4, 7]), rng.randint(6, 24)
            spec = EngineSpec(size, pages, rng.randint(1, 5), max_seq_len=size * pages, vocab_size=50)
            clients = [_any_job(rng, uid, size * pages) for uid in range(1, 2 + min(seed, 10))]
            overlap, chunk = rng.random() < 0.5, rng.choice([1, 3, 8, 8192])
            self.drive(clients, spec, rng.choice(["radix", "naive"]), overlap=overlap, max_prefill_tokens=chunk)


_SPEC = EngineSpec(page_size=4, num_pages=40, max_running_requests=4, max_seq_len=160, vocab_size=50)


def _job(uid: int, length: int, answer: int = 6, first: int | None = None, **more: Any) -> Job:
    start = uid * 7 if first is None else first
    prompt = [(start + i * i) % 50 for i in range(length)]
    return Job(uid, prompt, SamplingParams(max_tokens=answer, temperature=0.0), **more)


def _any_job(rng: random.Random, uid: int, room: int) -> Job:
    answer = rng.randint(1, max(room // 3, 1))
    length = rng.randint(1, max(room - answer, 1))
    arrive = rng.choice([0, 0, 1, 4, 9])
    abort = arrive + rng.randint(0, 12) if rng.random() < 0.2 else None
    return _job(uid, length, min(answer, room - length) or 1, rng.choice([0, uid]), arrive=arrive, abort=abort)
