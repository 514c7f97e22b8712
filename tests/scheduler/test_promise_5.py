"""Promise 5: admission counts whole pages, eviction comes before retraction, the least urgent request is retracted."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import msgspec
import pluggy
import pytest

from minisgl import hooks
from minisgl.core import Req, SamplingParams
from minisgl.hooks import hookimpl
from minisgl.plugins.scheduler.mixed import MixedPolicy
from minisgl.scheduler.base import Budget, Plan, Running, Waiting
from minisgl.scheduler.planner import Planner, PolicyError
from minisgl.testing import expected_output
from minisgl.testing.drive import Job, make_plugin
from minisgl.testing.small import SPEC, job, make, no_lookahead, pool
from minisgl.testing.traced import traced
from minisgl.testing.workloads import POLICIES
from minisgl.trace.check import check
from minisgl.trace.read import read


def test_promise_5_admission_counts_whole_pages() -> None:
    """A pool of 3 pages of 4 tokens holds 12 tokens, but only one request of 5 tokens: the request needs 2 pages."""
    with no_lookahead():
        report = make(spec=pool(3), cache="naive").run([job(1, 5, 3), job(2, 5, 3)])
    assert report.counts.max_rows == 1
    assert report.retractions == 0


class Journal:
    """An observer that records retractions, and checks that the least urgent running request is retracted.

    Without priorities, that is the youngest one. With ``any_order``, it need only not be the most urgent one.
    """

    def __init__(self, any_order: bool = False) -> None:
        self.any_order = any_order
        self.retracted: list[int] = []
        self.running: dict[int, Req] = {}
        manager = pluggy.PluginManager(hooks.PROJECT)
        manager.add_hookspecs(hooks)
        manager.register(self)
        self.hook = manager.hook

    @hookimpl
    def minisgl_prefix_matched(self, req: Req) -> None:
        self.running[req.uid] = req

    @hookimpl
    def minisgl_request_retracted(self, req: Req) -> None:
        order = sorted(self.running.values(), key=lambda r: (r.priority, r.arrival))
        assert req is not order[0], "the most urgent running request is retracted"
        assert self.any_order or req is order[-1], "a less urgent request runs"
        del self.running[req.uid]
        self.retracted.append(req.uid)

    @hookimpl
    def minisgl_request_finished(self, req: Req) -> None:
        self.running.pop(req.uid, None)


@pytest.mark.parametrize("cache", ["naive", "radix"])
@pytest.mark.parametrize("policy", POLICIES)
def test_promise_5_retraction(policy: str, cache: str) -> None:
    """The youngest request is retracted, keeps its output, and finishes in order of arrival."""
    journal = Journal()
    with no_lookahead():
        drive = make(policy, cache=cache, spec=pool(9), observers=journal.hook)
        report = drive.run([job(uid, 5, 24) for uid in (1, 2, 3, 4)])
    assert report.retractions == len(journal.retracted) > 0
    assert 1 not in journal.retracted
    assert all(end.output_tokens == 24 for end in report.finished.values())
    ends = [report.first_token[uid] for uid in (1, 2, 3, 4)]
    assert ends == sorted(ends)


def prioritised(priorities: Sequence[int]) -> list[Job]:
    """Return requests 1, 2, … with these priorities, of which the pool of `test_promise_5_retraction` holds two."""
    jobs = [job(uid, 5, 24) for uid in range(1, len(priorities) + 1)]
    return [
        replace(each, params=msgspec.structs.replace(each.params, priority=priority))
        for each, priority in zip(jobs, priorities, strict=True)
    ]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("cache", ["naive", "radix"])
@pytest.mark.parametrize("priorities", [(0, 0, 0, 0), (1, 0, 0, 2), (5, 4, 3, -1), (2, -7, 2, -7)])
def test_promise_5_retraction_by_priority(priorities: Sequence[int], cache: str, overlap: bool) -> None:
    """The least urgent request is retracted, and among equals the youngest; the most urgent one never is."""
    journal = Journal()
    with no_lookahead():
        drive = make("priority", cache=cache, spec=pool(9), observers=journal.hook, overlap=overlap)
        report = drive.run(prioritised(priorities))
    assert journal.retracted
    assert min((priority, uid) for uid, priority in enumerate(priorities, 1))[1] not in journal.retracted
    assert all(end.output_tokens == 24 for end in report.finished.values())


class OldestFirst(MixedPolicy):
    """A policy that wants the oldest request to be retracted first."""

    def __init__(self) -> None:
        super().__init__("fcfs")

    def victims(self, running: Sequence[Running]) -> Sequence[int]:
        return [view.uid for view in sorted(running, key=lambda view: view.arrival)]


@pytest.mark.parametrize("overlap", [False, True])
def test_promise_5_the_policy_chooses_the_victims(overlap: bool) -> None:
    """Request 2 is retracted before 3 and 4, as the policy wishes; the oldest one never is, although it is named."""
    journal = Journal(any_order=True)
    with no_lookahead():
        report = make(OldestFirst(), spec=pool(9), observers=journal.hook, overlap=overlap).run(prioritised([0] * 4))
    assert journal.retracted[0] == 2
    assert 1 not in journal.retracted
    assert all(end.output_tokens == 24 for end in report.finished.values())


@pytest.mark.parametrize("wrong", [[], [1, 1], [1, 2, 3, 4, 99]])
def test_promise_5_victims_of_the_policy_are_checked(wrong: list[int]) -> None:
    policy = OldestFirst()
    policy.victims = lambda running: wrong  # type: ignore[method-assign]
    with no_lookahead(), pytest.raises(PolicyError, match=r"victims\(\) returned"):
        make(policy, spec=pool(9)).run(prioritised([0] * 4))


@pytest.mark.parametrize("policy", ["mixed", "priority"])
def test_promise_5_the_most_urgent_request_as_victim_is_found(policy: str, tmp_path: Path) -> None:
    """A planted bug: the request that must never be retracted is retracted. An observer and the trace show it."""
    priorities = [0] * 4 if policy == "mixed" else [3, -1, 2, 2]
    right = Planner.victims
    with no_lookahead(), patch.object(Planner, "victims", lambda planner: right(planner)[::-1]):
        journal = Journal(any_order=True)
        with pytest.raises(AssertionError, match="the most urgent running request is retracted"):
            make(policy, spec=pool(9), observers=journal.hook).run(prioritised(priorities))
        plugins = make_plugin("cache", "radix", page_size=4), make_plugin("scheduler", policy)
        with traced(tmp_path / "run.jsonl", pool(9), *plugins) as drive, suppress(AssertionError):
            drive.run(prioritised(priorities), max_steps=300)
    violation = check(read(tmp_path / "run.jsonl"))
    assert violation is not None and violation.rule == "retraction"


def test_promise_5_eviction_before_retraction() -> None:
    with no_lookahead():
        drive = make(spec=pool(14))
        drive.run([job(1, 25, 4)])
        assert drive.cache.total_pages >= 6
        report = drive.run([job(2, 5, 20), job(3, 5, 20)])
    assert report.retractions == 0


@pytest.mark.parametrize(("page_size", "length"), [(1, 12), (4, 13), (12, 13)])
def test_promise_5_cached_prompt_computes_one_token(page_size: int, length: int) -> None:
    drive = make(spec=pool(-(-40 // page_size), page_size))
    drive.run([job(1, length, 3, first=3)])
    before = drive.engine.counts.prompt_tokens
    report = drive.run([job(2, length, 3, first=3)])
    assert report.counts.prompt_tokens - before == 1
    assert report.finished[2].cached_tokens == length - 1


def test_promise_5_request_uses_the_whole_pool() -> None:
    with no_lookahead():
        report = make(spec=pool(5)).run([job(1, 2, 18), job(2, 2, 18)])
    assert report.finished[2].output_tokens == 18


class Fickle:
    """A policy that retracts the youngest request in call number ``turn``, and plans all that it is granted."""

    def __init__(self, turn: int):
        self.turns = turn

    def plan(self, waiting: Sequence[Waiting], running: Sequence[Running], budget: Budget) -> Plan:
        self.turns -= 1
        retract = [running[-1].uid] if self.turns == 0 else []
        rows = [
            (r.uid, n) for r in running if r.uid not in retract and (n := budget.grant(r, r.num_remaining_tokens or 1))
        ]
        rows += [(w.uid, n) for w in waiting if (n := budget.grant(w, w.num_tokens - w.num_cached_tokens))]
        return Plan(rows, retract)


@pytest.mark.parametrize("overlap", [False, True])
def test_promise_5_retracted_output_is_another_prompt(overlap: bool) -> None:
    """The output of a retracted request goes into the cache, so a row of the same plan has fewer tokens to compute."""
    older, younger = job(1, 9, 20), job(2, 9, 20)
    answer = expected_output(younger.request, SPEC.vocab_size).tokens
    turn = Job(3, [*younger.prompt, *answer[:6], 1, 2], younger.params, arrive=7)
    report = make(Fickle(8), overlap=overlap).run([older, younger, turn])
    assert report.counts.admissions == {1: 1, 2: 2, 3: 1}


@pytest.mark.parametrize("num_pages", [12, 14, 16, 18])
def test_promise_5_retraction_locks_pages_of_another_row(num_pages: int) -> None:
    """After a retraction, another row of the same plan may not fit any more, and is dropped.

    The retracted request computed pages that the cache also holds. The cached pages stay locked until the step in
    flight is read, so the new prompt, which needs every page of the pool, does not fit.
    """
    with no_lookahead():
        drive = make(Fickle(16), spec=pool(num_pages))
        drive.run([job(1, 9, 8)])
        again = Job(3, job(1).prompt, SamplingParams(max_tokens=12, temperature=0.0))
        drive.run([job(2, 9, 12), again, job(4, 4 * num_pages - 35, 4, arrive=7)])
