"""Random requests through the real scheduler, caches and policies, on the simulated engine.

`Drive` and the simulated engine check every run: one correct reply for each request, the owner of every page, and the
form of every step.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from random import Random
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from minisgl.scheduler.base import Budget, Plan, Running, Waiting
from minisgl.scheduler.request_table import Reserve
from minisgl.testing.drive import Drive, Job
from minisgl.testing.workloads import CACHES, POLICIES, Setup, jobs, setups

EXAMPLES = int(os.environ.get("MINISGL_WORKLOADS", "20"))
"""How many workloads most tests draw. `make soak` draws more."""
FEW = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def run(setup: Setup, clients: list[Job]) -> Drive:
    spec, cache, policy, options = setup.build()
    drive = Drive(spec, cache, policy, **options)
    drive.run(clients)
    if spec.max_seq_len >= spec.num_pages * spec.page_size:
        drive.check_whole_pool()
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
def test_usual_page_sizes(page_size: int, data: st.DataObject) -> None:
    setup = data.draw(setups(page_size=page_size))
    run(setup, data.draw(jobs(setup)))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("cache", CACHES)
@settings(FEW, max_examples=EXAMPLES + EXAMPLES // 2)
@given(st.data(), st.sampled_from([0, 2]))
def test_no_reserve_for_running_requests(cache: str, overlap: bool, data: st.DataObject, lookahead: int) -> None:
    """Admission keeps no or few pages for running requests, so decode often runs out of pages."""
    setup = data.draw(setups(cache=cache, overlap=overlap))
    clients = data.draw(jobs(setup, aborts=data.draw(st.booleans())))
    with patch.object(Reserve, "num_tokens", lookahead):
        run(setup, clients)


class RandomPolicy:
    """A policy that plans random parts of random requests within the budget, and retracts up to ``retractions``."""

    uses_priority = True  # it accepts any priority and is fair to none

    def __init__(self, random: Random, retractions: int):
        self.random, self.retractions = random, retractions

    def plan(self, waiting: Sequence[Waiting], running: Sequence[Running], budget: Budget) -> Plan:
        requests: list[Waiting | Running] = [*running, *waiting]
        self.random.shuffle(requests)
        rows: list[tuple[int, int]] = []
        retract: list[int] = []
        for request in requests:
            chance = self.random.random()
            if chance < 0.2 and isinstance(request, Running) and self.retractions:
                self.retractions -= 1
                retract.append(request.uid)
            elif chance > 0.3:
                if isinstance(request, Running):
                    limit = request.num_remaining_tokens or 1
                else:
                    limit = request.num_tokens - request.num_cached_tokens
                if granted := budget.grant(request, self.random.randint(1, limit)):
                    rows.append((request.uid, granted))
        return Plan(rows, retract)


@pytest.mark.parametrize("cache", CACHES)
@settings(FEW, max_examples=EXAMPLES + EXAMPLES // 2)
@given(st.data(), st.randoms(use_true_random=False), st.sampled_from([0, 2, 32]))
def test_random_policy(cache: str, data: st.DataObject, random: Random, lookahead: int) -> None:
    setup = data.draw(setups(cache=cache, starvation_steps=8))
    spec, prefix_cache, _, options = setup.build()
    with patch.object(Reserve, "num_tokens", lookahead):
        Drive(spec, prefix_cache, RandomPolicy(random, retractions=12), **options).run(
            data.draw(jobs(setup)), max_steps=5_000
        )


class Clients(RuleBasedStateMachine):
    """Requests are sent and aborted in any order, and the idle pool is checked in between."""

    drive: Drive

    @initialize(setup=setups())
    def start(self, setup: Setup) -> None:
        self.setup = setup
        spec, cache, policy, options = setup.build()
        self.drive = Drive(spec, cache, policy, **options)
        self.sent = 0

    @rule(data=st.data())
    def send(self, data: st.DataObject) -> None:
        for job in data.draw(jobs(self.setup, max_jobs=3)):
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
    max_examples=EXAMPLES, stateful_step_count=12, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
