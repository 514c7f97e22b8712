"""The scheduler's promises of DESIGN.md, one by one, on the simulated engine. `Drive` judges every run besides."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from minisgl.core import EngineDeadError, EngineSpec, InvalidRequestError, SamplingParams, Step, StepResult
from minisgl.scheduler.base import Budget, Plan, Running, SchedulerPolicy, Waiting
from minisgl.scheduler.page_allocator import PageOwnershipError
from minisgl.testing import SimEngine
from minisgl.testing.drive import Job, make_plugin
from minisgl.testing.small import job, make, pool, tight
from minisgl.testing.workloads import POLICIES

# ---- 1: one final reply ------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_promise_1_one_reply_whenever_a_client_hangs_up(policy: str, overlap: bool) -> None:
    for leaver in (1, 2, 3):
        for moment in range(14):
            clients = [job(uid, 3 + 6 * uid, 4, abort=moment if uid == leaver else None) for uid in (1, 2, 3)]
            report = make(policy, spec=pool(12, slots=2), overlap=overlap, max_prefill_tokens=8).run(clients)
            assert sorted(report.finished) == [1, 2, 3]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
def test_promise_1_one_reply_whenever_the_engine_dies(overlap: bool, late: bool) -> None:
    for step in range(12):
        drive = make(overlap=overlap, engine=partial(SimEngine, dies_at=step, dies_late=late), spec=pool(12, slots=2))
        with pytest.raises(EngineDeadError):
            drive.run([job(1), job(2), job(3, 14, arrive=2)])
        was_open = drive.report.tokens.keys() - drive.report.finished.keys()
        output = drive.fail("the device is gone")
        assert {end.uid for end in output.finished} == was_open
        assert {(end.finish_reason, end.error) for end in output.finished} == {("error", "the device is gone")}
        assert not drive.scheduler.has_work


def test_promise_1_a_hang_up_of_nobody_is_nothing() -> None:
    drive = make()
    drive.abort(77)
    drive.run([job(1)])
    drive.abort(1)
    assert not drive.scheduler.has_work


# ---- 2: refused before it is queued ------------------------------------------------------------------

REFUSED: dict[str, tuple[Sequence[int], dict[str, Any], str]] = {
    "an empty prompt": ([], {}, "prompt"),
    "a prompt too long": ([1] * 120, {}, "prompt"),
    "an answer too long": ([1] * 20, {"max_tokens": 101}, "max_tokens"),
    "a token that is not in the vocabulary": ([1, 50], {}, "prompt"),
    "a negative token": ([-1], {}, "prompt"),
    "no answer at all": ([1], {"max_tokens": 0}, "max_tokens"),
    "a negative temperature": ([1], {"temperature": -0.1}, "temperature"),
    "a temperature that is no number": ([1], {"temperature": float("nan")}, "temperature"),
    "top_p of nothing": ([1], {"top_p": 0.0}, "top_p"),
    "a stop token that is not in the vocabulary": ([1], {"stop_token_ids": (50,)}, "stop_token_ids"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_promise_2_refused_before_it_is_queued_and_nobody_is_harmed(what: str) -> None:
    prompt, params, field = REFUSED[what]
    drive = make()
    drive.add(job(1))
    drive.step()
    assert not drive.add(Job(2, prompt, SamplingParams(**params)))
    assert drive.report.refused[2].field == field
    report = drive.run([job(3)])
    assert sorted(report.finished) == [1, 3]


def test_promise_2_what_the_pool_can_never_hold_is_refused_and_what_it_just_holds_is_served() -> None:
    spec = EngineSpec(page_size=4, num_pages=5, max_running_requests=2, max_seq_len=1000, vocab_size=50)
    drive = make(spec=spec)
    assert not drive.add(job(1, 15, 7))  # 21 tokens of KV
    assert not drive.add(job(2, 22, 1))
    report = drive.run([job(3, 12, 8), job(4, 20, 1), job(5, 1, 20)])
    assert sorted(report.finished) == [3, 4, 5]


def test_promise_2_a_refusal_says_what_was_given_and_what_the_limit_is() -> None:
    with pytest.raises(InvalidRequestError, match=r"100.*30.*120"):
        make().scheduler.add_request(1, [1] * 100, SamplingParams(max_tokens=30))


# ---- 3: one owner: see test_ledger.py and the rules of SimEngine -------------------------------------


def test_promise_3_a_page_is_used_again_only_after_the_steps_in_flight_were_read() -> None:
    """Two requests that each need the whole pool: the second waits for the step in flight at the first one's end."""
    report = make(spec=pool(4), cache="naive").run([job(1, 9, 7, abort=4), job(2, 9, 7)])
    assert report.counts.seats == {1: 1, 2: 1}


# ---- 4: tables never point to what was given back ----------------------------------------------------


class Hasty:
    """Everything at once; it does not wait for another request's prefix, so that prefixes are computed twice."""

    def plan(self, waiting: Sequence[Waiting], running: Sequence[Running], budget: Budget) -> Plan:
        rows = [(r.uid, n) for r in running if (n := budget.grant(r, r.num_remaining_tokens or 1))]
        rows += [(w.uid, n) for w in waiting if (n := budget.grant(w, w.num_tokens - w.num_cached_tokens))]
        return Plan(rows)


@pytest.mark.parametrize("overlap", [False, True])
def test_promise_4_duplicates_are_pointed_at_the_cached_pages_and_then_given_back(overlap: bool) -> None:
    drive = make(Hasty(), overlap=overlap)
    for uid in (1, 2, 3):
        drive.add(job(uid, 17, 12, first=5))
    for _ in range(4):
        drive.step()
    tables = [drive.engine.pages_of(uid).tolist() for uid in (1, 2, 3)]
    assert tables[0][:4] == tables[1][:4] == tables[2][:4]
    assert len({page for table in tables for page in table[4:]}) == sum(len(table[4:]) for table in tables)
    newcomer = drive.run([job(4, 30, 3, first=30)])
    assert newcomer.counts.prompt_tokens == 3 * 17 + 30


# ---- 6: no starvation --------------------------------------------------------------------------------


class Ignores:
    """A policy that never sees some requests, while they wait or while they run; otherwise the `mixed` one."""

    def __init__(self, waiting: set[int] = frozenset(), running: set[int] = frozenset()):  # type: ignore[assignment]
        self.waiting, self.running = waiting, running
        self.inner: SchedulerPolicy = make_plugin("scheduler", "mixed")

    def plan(self, waiting: Sequence[Waiting], running: Sequence[Running], budget: Budget) -> Plan:
        heard = [w for w in waiting if w.uid not in self.waiting]
        return self.inner.plan(heard, [r for r in running if r.uid not in self.running], budget)


class Idle:
    """A policy that never wants anything."""

    def plan(self, waiting: Sequence[Waiting], running: Sequence[Running], budget: Budget) -> Plan:
        return Plan(())


class NewestFirst:
    """A policy that always prefers who came last, and gives them all it has."""

    def plan(self, waiting: Sequence[Waiting], running: Sequence[Running], budget: Budget) -> Plan:
        rows = [(r.uid, n) for r in running if (n := budget.grant(r, r.num_remaining_tokens or 1))]
        rows += [
            (w.uid, n) for w in reversed(list(waiting)) if (n := budget.grant(w, w.num_tokens - w.num_cached_tokens))
        ]
        return Plan(rows)


def stream(count: int, every: int = 2) -> list[Job]:
    """One short request after the other."""
    return [job(uid, 6, 6, arrive=every * (uid - 2)) for uid in range(2, count + 2)]


@pytest.mark.parametrize("overlap", [False, True])
def test_promise_6_a_waiting_request_that_the_policy_ignores_is_served(overlap: bool) -> None:
    drive = make(Ignores(waiting={1}), overlap=overlap, starvation_steps=10)
    report = drive.run([job(1, arrive=4), *stream(40)])
    assert 14 <= report.first_token[1] <= 18


@pytest.mark.parametrize("overlap", [False, True])
def test_promise_6_a_running_request_that_the_policy_ignores_goes_on(overlap: bool) -> None:
    drive = make(Ignores(running={1}), overlap=overlap, starvation_steps=10)
    report = drive.run([job(1, 9, 5), *stream(60)])
    assert report.finished[1].output_tokens == 5
    assert 10 <= report.worst_gap <= 12


@pytest.mark.parametrize("overlap", [False, True])
def test_promise_6_a_request_gets_its_turn_although_newer_ones_fill_every_slot(overlap: bool) -> None:
    drive = make(NewestFirst(), overlap=overlap, starvation_steps=12, spec=pool(30, slots=1))
    report = drive.run([job(2, 6, 6), job(1, 6, 6), *[job(uid, 6, 6, arrive=uid) for uid in range(3, 60)]])
    assert report.first_token[1] <= 12 + 20
    assert report.first_token[1] < report.first_token[40]


def test_promise_6_a_policy_that_plans_nothing_stops_nobody() -> None:
    report = make(Idle(), starvation_steps=3).run([job(uid) for uid in (1, 2, 3)])
    assert sorted(report.finished) == [1, 2, 3]


class Wasteful:
    """A policy that asks for everything and uses nothing of it."""

    def plan(self, waiting: Sequence[Waiting], running: Sequence[Running], budget: Budget) -> Plan:
        for w in waiting:
            budget.grant(w, w.num_tokens)
        for r in running:
            budget.grant(r, r.num_remaining_tokens or 1)
        return Plan(())


def test_promise_6_a_policy_that_is_granted_everything_and_plans_nothing_stops_nobody() -> None:
    report = make(Wasteful(), starvation_steps=3, max_prefill_tokens=16).run([job(uid, 20) for uid in (1, 2, 3)])
    assert sorted(report.finished) == [1, 2, 3]


# ---- 7: the other ranks ------------------------------------------------------------------------------


def test_promise_7_a_rank_that_replays_the_encoded_steps_samples_the_same() -> None:
    class TwoRanks(SimEngine):
        """Rank 0, which sends each step to a follower as bytes."""

        def __init__(self, *args: Any, **kwargs: Any):
            super().__init__(*args, **kwargs)
            self.follower = SimEngine(*args, **kwargs)

        def launch(self, step: Step) -> None:
            super().launch(step)
            self.follower.launch(Step.decode(step.encode()))

        def result(self) -> StepResult:
            mine, theirs = super().result(), self.follower.result()
            assert mine.tokens.tolist() == theirs.tokens.tolist()
            return mine

    with tight():
        drive = make(engine=TwoRanks, spec=pool(12), max_prefill_tokens=8)
        report = drive.run([job(uid, 5 + uid, 12, first=uid % 2, abort=9 if uid == 3 else None) for uid in range(1, 7)])
    assert report.counts == drive.engine.follower.counts  # type: ignore[attr-defined]


# ---- 8: the answer does not depend on the neighbours -------------------------------------------------

CROWD = [job(uid, 6 + 3 * uid, 14, first=uid % 2) for uid in range(1, 7)]
VARIANTS: dict[str, dict[str, Any]] = {
    "batched": {},
    "chunked": {"max_prefill_tokens": 3},
    "without overlap": {"overlap": False},
    "without a cache": {"cache": "naive"},
    "pages of one": {"spec": pool(120, 1)},
    "pages of 64": {"spec": pool(8, 64)},
    "static": {"policy": "static"},
    "decode first": {"policy": "decode_first"},
    "retracted": {"spec": pool(12)},
}


@pytest.mark.parametrize("what", VARIANTS)
def test_promise_8_the_answer_does_not_depend_on_the_neighbours(what: str) -> None:
    alone: dict[int, list[int]] = {}
    for client in CROWD:
        alone |= make().run([client]).tokens
    with tight():
        drive = make(**VARIANTS[what])
        report = drive.run(CROWD)
        assert report.tokens == alone
        assert (report.retractions > 0) == (what == "retracted")
        warm = drive.run([Job(client.uid + 100, client.prompt, client.params) for client in CROWD])
    assert {uid - 100: tokens for uid, tokens in warm.tokens.items() if uid > 100} == alone


def test_promise_8_a_seed_gives_the_same_answer_in_any_batch() -> None:
    params = SamplingParams(max_tokens=12, seed=1234)
    alone = make().run([Job(1, [4, 5, 6], params)]).tokens[1]
    others = [Job(uid, [4, 5, 6], SamplingParams(max_tokens=12, seed=uid)) for uid in (2, 3)]
    together = make().run([*others, Job(1, [4, 5, 6], params)])
    assert together.tokens[1] == alone
    assert together.tokens[2] != together.tokens[3] != alone


# ---- 9: the pool is whole when idle ------------------------------------------------------------------


@pytest.mark.parametrize("cache", ["naive", "radix"])
def test_promise_9_the_pool_is_whole_when_idle(cache: str) -> None:
    with tight():
        drive = make(cache=cache, spec=pool(12))
        for wave in range(4):
            drive.run([job(10 * wave + uid, 5 + uid, 12, abort=7 if uid == 2 else None) for uid in range(1, 5)])
            now = drive.scheduler.stats()
            assert now["pages_free"] + now["pages_cached"] + now["pages_retiring"] == now["pages"] == 12
            assert (now["running"], now["waiting"], now["unread_steps"]) == (0, 0, 0)
            assert now["pages_cached"] == now["pages_evictable"]
        drive.probe()


def test_promise_9_the_scheduler_itself_looks_when_it_goes_idle() -> None:
    drive = make()
    drive.add(job(1))
    drive.step()
    drive.scheduler.cache_manager.allocator.allocate(1, owner=99)
    with pytest.raises(PageOwnershipError, match="pages are lost"):  # noqa: PT012
        while drive.scheduler.has_work:
            drive.scheduler.step()
