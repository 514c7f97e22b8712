"""Promise 5: admission counts whole pages, eviction comes before retraction, the youngest request is retracted."""

from __future__ import annotations

from collections.abc import Sequence

import pluggy
import pytest

from minisgl import hooks
from minisgl.core import Req, SamplingParams
from minisgl.hooks import hookimpl
from minisgl.scheduler.base import Budget, Plan, Running, Waiting
from minisgl.testing import expected_output
from minisgl.testing.drive import Job
from minisgl.testing.small import SPEC, job, make, no_lookahead, pool
from minisgl.testing.workloads import POLICIES


def test_promise_5_admission_counts_whole_pages() -> None:
    """A pool of 3 pages of 4 tokens holds 12 tokens, but only one request of 5 tokens: the request needs 2 pages."""
    with no_lookahead():
        report = make(spec=pool(3), cache="naive").run([job(1, 5, 3), job(2, 5, 3)])
    assert report.counts.max_rows == 1
    assert report.retractions == 0


class Journal:
    """An observer that records retractions, and checks that the youngest running request is retracted."""

    def __init__(self) -> None:
        self.open: list[int] = []
        self.retracted: list[int] = []
        self.running: set[int] = set()
        manager = pluggy.PluginManager(hooks.PROJECT)
        manager.add_hookspecs(hooks)
        manager.register(self)
        self.hook = manager.hook

    @hookimpl
    def minisgl_request_added(self, req: Req) -> None:
        self.open.append(req.uid)

    @hookimpl
    def minisgl_prefix_matched(self, req: Req) -> None:
        self.running.add(req.uid)

    @hookimpl
    def minisgl_request_retracted(self, req: Req) -> None:
        self.running.remove(req.uid)
        assert all(self.open.index(uid) < self.open.index(req.uid) for uid in self.running), "a younger request runs"
        self.retracted.append(req.uid)

    @hookimpl
    def minisgl_request_finished(self, req: Req) -> None:
        self.running.discard(req.uid)


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
