"""Random clients through the real scheduler, caches and policies, on the simulated engine. Every run ends with each
request answered once and rightly, each page where it belongs, and no rule of a step broken on the way.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from minisgl.scheduler.base import Budget, Plan, Running, Waiting
from minisgl.scheduler.cache_manager import CacheManager
from minisgl.testing.drive import Drive, Job
from minisgl.testing.workloads import CACHES, POLICIES, Setup, jobs, setups

FEW = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def run(setup: Setup, clients: list[Job]) -> Drive:
    spec, cache, policy, options = setup.build()
    drive = Drive(spec, cache, policy, **options)
    drive.run(clients)
    if spec.max_seq_len >= spec.num_pages * spec.page_size:
        drive.probe()
    return drive


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("cache", CACHES)
@FEW
@given(st.data())
def test_any_workload(cache: str, policy: str, data: st.DataObject) -> None:
    setup = data.draw(setups(cache=cache, policy=policy))
    run(setup, data.draw(jobs(setup)))


@pytest.mark.parametrize("page_size", [1, 16, 64])
@FEW
@given(st.data())
def test_any_workload_in_the_usual_page_sizes(page_size: int, data: st.DataObject) -> None:
    setup = data.draw(setups(page_size=page_size))
    run(setup, data.draw(jobs(setup)))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("cache", CACHES)
@settings(FEW, max_examples=60)
@given(st.data(), st.sampled_from([0, 2]))
def test_any_workload_where_admission_keeps_no_reserve(
    cache: str, overlap: bool, data: st.DataObject, lookahead: int
) -> None:
    """Decode runs out of pages often, so that requests are retracted."""
    setup = data.draw(setups(cache=cache, overlap=overlap))
    clients = data.draw(jobs(setup, aborts=data.draw(st.booleans())))
    with patch.object(CacheManager, "LOOKAHEAD", lookahead):
        run(setup, clients)


class Whims:
    """A policy that follows no rule but the budget's: anyone, any part of a prompt, nobody at all, and up to ``tired``
    requests put back into the queue."""

    def __init__(self, random: Random, tired: int):
        self.random, self.tired = random, tired

    def plan(self, waiting: Sequence[Waiting], running: Sequence[Running], budget: Budget) -> Plan:
        everyone: list[Waiting | Running] = [*running, *waiting]
        self.random.shuffle(everyone)
        rows: list[tuple[int, int]] = []
        retract: list[int] = []
        for who in everyone:
            whim = self.random.random()
            if whim < 0.2 and isinstance(who, Running) and self.tired:
                self.tired -= 1
                retract.append(who.uid)
            elif whim > 0.3:
                most = (
                    who.num_remaining_tokens or 1
                    if isinstance(who, Running)
                    else who.num_tokens - who.num_cached_tokens
                )
                if granted := budget.grant(who, self.random.randint(1, most)):
                    rows.append((who.uid, granted))
        return Plan(rows, retract)


@pytest.mark.parametrize("cache", CACHES)
@settings(FEW, max_examples=60)
@given(st.data(), st.randoms(use_true_random=False), st.sampled_from([0, 2, 32]))
def test_any_workload_under_a_policy_without_reason(
    cache: str, data: st.DataObject, random: Random, lookahead: int
) -> None:
    setup = data.draw(setups(cache=cache, starvation_steps=8))
    spec, prefix_cache, _, options = setup.build()
    with patch.object(CacheManager, "LOOKAHEAD", lookahead):
        Drive(spec, prefix_cache, Whims(random, tired=12), **options).run(data.draw(jobs(setup)), max_steps=5_000)


class Clients(RuleBasedStateMachine):
    """Clients that come, wait, hang up and come again, in any order, with a look at the idle pool in between."""

    drive: Drive

    @initialize(setup=setups())
    def start(self, setup: Setup) -> None:
        self.setup = setup
        spec, cache, policy, options = setup.build()
        self.drive = Drive(spec, cache, policy, **options)
        self.sent = 0

    @rule(data=st.data())
    def send(self, data: st.DataObject) -> None:
        for job in data.draw(jobs(self.setup, most=3)):
            self.sent += 1
            self.drive.add(Job(self.sent, job.prompt, job.params))

    @rule(data=st.data())
    def hang_up(self, data: st.DataObject) -> None:
        self.drive.abort(data.draw(st.integers(1, self.sent + 1)))

    @rule(steps=st.integers(1, 6))
    def steps(self, steps: int) -> None:
        for _ in range(steps):
            self.drive.step()

    @precondition(lambda self: self.drive.scheduler.has_work)
    @rule()
    def until_idle(self) -> None:
        self.drive.run([])

    def teardown(self) -> None:
        if hasattr(self, "drive"):
            self.drive.run([])


TestClients = Clients.TestCase
TestClients.settings = settings(
    max_examples=60, stateful_step_count=12, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
