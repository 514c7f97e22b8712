"""The promises of docs/architecture.md, one by one, on the simulated engine. `Drive` also checks every run."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from minisgl.core import EngineDeadError, EngineSpec, InvalidRequestError, SamplingParams, Step, StepResult
from minisgl.plugins.scheduler.guard import StarvationGuard
from minisgl.scheduler.base import Budget, Plan, Running, SchedulerPolicy, Waiting
from minisgl.scheduler.page_allocator import PageOwnershipError
from minisgl.testing import SimEngine
from minisgl.testing.drive import Job, make_plugin
from minisgl.testing.small import job, make, no_lookahead, pool
from minisgl.testing.workloads import POLICIES

# ---- 1: one final reply ------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_promise_1_abort_at_any_time(policy: str, overlap: bool) -> None:
    for leaver in (1, 2, 3):
        for moment in range(14):
            clients = [job(uid, 3 + 6 * uid, 4, abort=moment if uid == leaver else None) for uid in (1, 2, 3)]
            report = make(policy, spec=pool(12, max_running_requests=2), overlap=overlap, max_prefill_tokens=8).run(
                clients
            )
            assert sorted(report.finished) == [1, 2, 3]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
def test_promise_1_engine_fails_at_any_time(overlap: bool, late: bool) -> None:
    for step in range(12):
        drive = make(
            overlap=overlap,
            engine=partial(SimEngine, dies_at=step, dies_late=late),
            spec=pool(12, max_running_requests=2),
        )
        with pytest.raises(EngineDeadError):
            drive.run([job(1), job(2), job(3, 14, arrive=2)])
        was_open = drive.report.tokens.keys() - drive.report.finished.keys()
        output = drive.fail("the device is gone")
        assert {end.uid for end in output.finished} == was_open
        assert {(end.finish_reason, end.error) for end in output.finished} == {("error", "the device is gone")}
        assert not drive.scheduler.has_work


@pytest.mark.parametrize("late", [False, True])
def test_a_failed_scheduler_computes_nothing_more(late: bool) -> None:
    """Its engine may hold unread results and write to pages: no turn and no new request after `Scheduler.fail`."""
    drive = make(engine=partial(SimEngine, dies_at=2, dies_late=late))
    with pytest.raises(EngineDeadError):
        drive.run([job(1), job(2), job(3, 14, arrive=2)])
    drive.fail("the device is gone")
    steps = drive.engine.counts.steps
    for _ in range(2):
        with pytest.raises(EngineDeadError, match=r"^the device is gone$"):
            drive.scheduler.step()
        with pytest.raises(EngineDeadError, match=r"^the device is gone$"):
            drive.scheduler.add_request(9, [5, 6], SamplingParams())
        drive.scheduler.abort_request(1)
        assert not drive.scheduler.fail("again")
        assert not drive.scheduler.has_work
    assert drive.engine.counts.steps == steps


def test_promise_1_abort_of_an_unknown_request() -> None:
    drive = make()
    drive.abort(77)
    drive.run([job(1)])
    drive.abort(1)
    assert not drive.scheduler.has_work


# ---- 2: refused before it is queued ------------------------------------------------------------------

REFUSED: dict[str, tuple[Sequence[int], dict[str, Any], str]] = {
    "empty prompt": ([], {}, "prompt"),
    "prompt too long": ([1] * 120, {}, "prompt"),
    "max_tokens too large": ([1] * 20, {"max_tokens": 101}, "max_tokens"),
    "token id above the vocabulary": ([1, 50], {}, "prompt"),
    "negative token id": ([-1], {}, "prompt"),
    "max_tokens 0": ([1], {"max_tokens": 0}, "max_tokens"),
    "negative temperature": ([1], {"temperature": -0.1}, "temperature"),
    "temperature NaN": ([1], {"temperature": float("nan")}, "temperature"),
    "top_p 0": ([1], {"top_p": 0.0}, "top_p"),
    "stop token id above the vocabulary": ([1], {"stop_token_ids": (50,)}, "stop_token_ids"),
}


# Prompts that are no sequence of token ids, or whose token ids do not fit into an int32 or an int64.
BAD_PROMPTS: dict[str, Any] = {
    "70 bits": [1, 2**70],
    "64 bits": [2**63, 1],
    "5,000 digits": [10**5000],
    "uint64": np.array([1, 2**64 - 1], np.uint64),
    "floats": [1.0, 2.0],
    "a float": [1, 2.5],
    "an array of floats": np.array([1.0, 2.0]),
    "bools": [True, False],
    "a bool": [1, True],
    "an array of bools": np.array([True]),
    "an array of objects": np.array([1, 2], object),
    "two dimensions": [[1, 2], [3, 4]],
    "an array of two dimensions": np.ones((2, 3), np.int64),
    "an empty array of two dimensions": np.ones((2, 0), np.int64),
    "a scalar array": np.array(5),
    "ragged": [[1, 2], [3]],
    "partly nested": [1, [2, 3]],
    "None": None,
    "a None": [1, None],
    "a number": 7,
    "text": "hello",
    "bytes": b"hello",
    "strings": ["1", "2"],
    "a set": {1, 2},
    "a dict": {1: 2},
    "an iterator": iter([1, 2]),
    "too long, and not in memory": range(10**15),
}


def refuse(uid: Any, prompt: Any, params: Any, error: type[Exception]) -> Any:
    """Add a request that must raise ``error``, check that nothing is left of it, and return the error."""
    drive = make()
    drive.add(job(1))
    drive.step()
    before = drive.scheduler.stats()
    with pytest.raises(error) as raised:
        drive.scheduler.add_request(uid, prompt, params)
    assert drive.scheduler.stats() == before
    assert list(drive.scheduler.requests) == [1]
    assert len(drive.scheduler.waiting) == 0
    drive.run([job(2), job(3)])
    assert [drive.scheduler._arrivals, len(drive.report.finished)] == [3, 3]
    return raised.value


@pytest.mark.parametrize("what", BAD_PROMPTS)
def test_promise_2_prompt_of_a_wrong_type(what: str) -> None:
    error = refuse(2, BAD_PROMPTS[what], SamplingParams(), InvalidRequestError)
    assert error.field == "prompt"
    assert len(error.message) < 200


def test_promise_2_sequences_and_arrays_of_integers_are_served() -> None:
    prompts: list[Any] = [(1, 2, 3), range(1, 4), [np.int64(1), 2, 3]]
    prompts += [np.array([1, 2, 3], dtype) for dtype in (np.uint8, np.int32, np.int64, np.uint64)]
    drive = make()
    for uid, prompt in enumerate(prompts):
        drive.add(Job(uid, prompt, SamplingParams(max_tokens=2, temperature=0.0)))
    report = drive.run([])
    assert len({tuple(tokens) for tokens in report.tokens.values()}) == 1
    assert len(report.finished) == len(prompts)


@pytest.mark.parametrize("uid", [-1, -3, 2**31, 2**70, 1.0, True, None, "1"])
def test_promise_2_uid(uid: Any) -> None:
    assert not isinstance(refuse(uid, [1], SamplingParams(), ValueError), InvalidRequestError)


def test_promise_2_uid_of_an_open_request() -> None:
    assert "uid 1 is already open" in str(refuse(1, [1], SamplingParams(), ValueError))


NAN, HUGE = float("nan"), 10**5000
INTEGERS = ["5", 1.0, True, HUGE, [1]]
NUMBERS = ["1", True, None, NAN, float("inf"), HUGE, [0.5]]
BAD_PARAMS: dict[str, list[Any]] = {
    **{key: [*INTEGERS, None, -2] for key in ("max_tokens", "n", "top_k")},
    **dict.fromkeys(("seed", "logprobs", "prompt_logprobs"), INTEGERS),
    "logprob_start_len": [*INTEGERS, None, -1],
    **{key: [*NUMBERS, -1.0] for key in ("temperature", "top_p", "min_p", "repetition_penalty")},
    **{key: [*NUMBERS, -3.0] for key in ("presence_penalty", "frequency_penalty")},
    **{key: [1, "yes", None] for key in ("ignore_eos", "skip_special_tokens")},
    "stop": ["abc", [1], ("",), ("a",) * 17, 5, {"a": "b"}, None],
    "stop_token_ids": [5, (1.0,), (True,), ("1",), (-1,), (50,), (HUGE,), (1,) * 1025, range(3), None],
    "logit_bias": [
        *({1: bad} for bad in (NAN, "1", 101, True, None, HUGE)),
        *({bad: 1.0} for bad in ("1", HUGE, -1, 50, 1.0)),
        *([1.0], None, dict.fromkeys(range(1025), 1.0)),
    ],
    "cache_salt": [5, "", "a" * 257],
}


@pytest.mark.parametrize("field", BAD_PARAMS)
def test_promise_2_parameter_of_a_wrong_type(field: str) -> None:
    for value in BAD_PARAMS[field]:
        error = refuse(2, [1], SamplingParams(**{field: value}), InvalidRequestError)
        assert error.field == field
        assert len(error.message) < 200


@pytest.mark.parametrize("params", [None, {"max_tokens": 5}, SamplingParams])
def test_promise_2_params_of_a_wrong_type(params: Any) -> None:
    assert refuse(2, [1], params, InvalidRequestError).field == "params"


@pytest.mark.parametrize("what", REFUSED)
def test_promise_2_invalid_request(what: str) -> None:
    """An invalid request is rejected before it is queued, with the field's name, and all other requests finish."""
    prompt, params, field = REFUSED[what]
    drive = make()
    drive.add(job(1))
    drive.step()
    assert not drive.add(Job(2, prompt, SamplingParams(**params)))
    assert drive.report.refused[2].field == field
    report = drive.run([job(3)])
    assert sorted(report.finished) == [1, 3]


def test_promise_2_size_of_the_pool() -> None:
    """A request that the KV pool can never hold is rejected; a request that just fits is served."""
    spec = EngineSpec(page_size=4, num_pages=5, max_running_requests=2, max_seq_len=1000, vocab_size=50)
    drive = make(spec=spec)
    assert not drive.add(job(1, 15, 7))  # 21 tokens of KV
    assert not drive.add(job(2, 22, 1))
    report = drive.run([job(3, 12, 8), job(4, 20, 1), job(5, 1, 20)])
    assert sorted(report.finished) == [3, 4, 5]


def test_promise_2_message_has_sizes_and_limit() -> None:
    with pytest.raises(InvalidRequestError, match=r"120.*100.*30"):
        make().scheduler.add_request(1, [1] * 100, SamplingParams(max_tokens=30))


# ---- 3: one owner; see also test_page_allocator.py and the rules of SimEngine ------------------------


def test_promise_3_page_is_free_after_the_steps_in_flight() -> None:
    """Each of two requests needs the whole pool: request 2 waits for the step in flight when request 1 is aborted."""
    report = make(spec=pool(4), cache="naive").run([job(1, 9, 7, abort=4), job(2, 9, 7)])
    assert report.counts.admissions == {1: 1, 2: 1}


# ---- 4: page tables name no retired page -------------------------------------------------------------


class ImpatientPolicy:
    """A policy that admits requests with equal prefixes at the same time, so that prefixes are computed twice."""

    def plan(self, waiting: Sequence[Waiting], running: Sequence[Running], budget: Budget) -> Plan:
        rows = [(r.uid, n) for r in running if (n := budget.grant(r, r.num_remaining_tokens or 1))]
        rows += [(w.uid, n) for w in waiting if (n := budget.grant(w, w.num_tokens - w.num_cached_tokens))]
        return Plan(rows)


@pytest.mark.parametrize("overlap", [False, True])
def test_promise_4_duplicates(overlap: bool) -> None:
    """Page tables change from duplicate pages to the cached pages before the duplicates are retired."""
    drive = make(ImpatientPolicy(), overlap=overlap)
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
    """The policy `mixed`, which ignores the uids ``waiting`` while these wait, and ``running`` while these run."""

    def __init__(self, waiting: set[int] = frozenset(), running: set[int] = frozenset()):  # type: ignore[assignment]
        self.waiting, self.running = waiting, running
        self.inner: SchedulerPolicy = make_plugin("scheduler", "mixed")

    def plan(self, waiting: Sequence[Waiting], running: Sequence[Running], budget: Budget) -> Plan:
        seen = [w for w in waiting if w.uid not in self.waiting]
        return self.inner.plan(seen, [r for r in running if r.uid not in self.running], budget)


class Idle:
    """A policy whose plans are empty."""

    def plan(self, waiting: Sequence[Waiting], running: Sequence[Running], budget: Budget) -> Plan:
        return Plan(())


class NewestFirst:
    """A policy that admits the newest request first, with as many tokens as fit."""

    def plan(self, waiting: Sequence[Waiting], running: Sequence[Running], budget: Budget) -> Plan:
        rows = [(r.uid, n) for r in running if (n := budget.grant(r, r.num_remaining_tokens or 1))]
        rows += [
            (w.uid, n) for w in reversed(list(waiting)) if (n := budget.grant(w, w.num_tokens - w.num_cached_tokens))
        ]
        return Plan(rows)


def stream(count: int, every: int = 2) -> list[Job]:
    """Return ``count`` short requests, one for every ``every`` steps."""
    return [job(uid, 6, 6, arrive=every * (uid - 2)) for uid in range(2, count + 2)]


@pytest.mark.parametrize("overlap", [False, True])
def test_promise_6_ignored_waiting_request(overlap: bool) -> None:
    drive = make(Ignores(waiting={1}), overlap=overlap, starvation_steps=10)
    report = drive.run([job(1, arrive=4), *stream(40)])
    assert 14 <= report.first_token[1] <= 18


@pytest.mark.parametrize("overlap", [False, True])
def test_promise_6_ignored_running_request(overlap: bool) -> None:
    drive = make(Ignores(running={1}), overlap=overlap, starvation_steps=10)
    report = drive.run([job(1, 9, 5), *stream(60)])
    assert report.finished[1].output_tokens == 5
    assert 10 <= report.worst_gap <= 12


@pytest.mark.parametrize("overlap", [False, True])
def test_promise_6_newest_first(overlap: bool) -> None:
    """A request is served although newer requests could fill the only request-pool row without end."""
    drive = make(NewestFirst(), overlap=overlap, starvation_steps=12, spec=pool(30, max_running_requests=1))
    report = drive.run([job(2, 6, 6), job(1, 6, 6), *[job(uid, 6, 6, arrive=uid) for uid in range(3, 60)]])
    assert report.first_token[1] <= 12 + 20
    assert report.first_token[1] < report.first_token[40]


def behind_an_older_request(count: int) -> list[Job]:
    """Return a request that runs for 120 steps, a later one that does not fit beside it, and ``count`` short ones."""
    old, late = job(1, 17, 120), job(2, 280, 5, arrive=4)
    stem = job(3, 8, 3, first=1, arrive=1)
    shorts = [Job(uid, [*stem.prompt, uid % 50], stem.params, arrive=2 * uid) for uid in range(4, 4 + count)]
    return [old, late, stem, *shorts]


LATE = EngineSpec(page_size=4, num_pages=80, max_running_requests=4, max_seq_len=320, vocab_size=50)


@pytest.mark.parametrize("overlap", [False, True])
def test_promise_6_request_that_waits_for_an_older_one(overlap: bool) -> None:
    """The late request starts when the old one ends. Until then, holding others back would not let it start sooner."""
    clients = behind_an_older_request(50)
    policy = make_plugin("scheduler", "mixed", order="lpm")  # prefers the short requests, whose prefix is cached
    report = make(policy, overlap=overlap, starvation_steps=10, spec=LATE).run(clients)
    ended = report.first_token[1] + 120
    assert ended - 1 <= report.first_token[2] <= ended + 2
    assert max(report.first_token[client.uid] - client.arrive for client in [clients[0], *clients[2:]]) <= 2
    assert report.retractions == 0


@pytest.mark.parametrize("overlap", [False, True])
def test_promise_6_younger_requests_give_way(overlap: bool) -> None:
    """Short requests arrive without end and fill the pool. The late one starts still, when the old one has ended."""
    old_and_late = behind_an_older_request(0)[:2]
    clients = [*old_and_late, *(job(uid, 25, 20, arrive=4 * uid) for uid in range(3, 120))]
    report = make(NewestFirst(), overlap=overlap, starvation_steps=10, spec=LATE, thorough=False).run(clients)
    ended = report.first_token[1] + 120
    assert ended - 1 <= report.first_token[2] <= ended + 6
    assert report.retractions > 0
    served_before = sum(step < ended for step in report.first_token.values())
    assert served_before > 15
    with patch.object(StarvationGuard, "_in_the_way", lambda self, starved: None):  # younger requests never give way
        report = make(NewestFirst(), overlap=overlap, starvation_steps=10, spec=LATE, thorough=False).run(clients)
    assert report.first_token[2] > 3 * ended


def test_promise_6_empty_plans() -> None:
    report = make(Idle(), starvation_steps=3).run([job(uid) for uid in (1, 2, 3)])
    assert sorted(report.finished) == [1, 2, 3]


class Wasteful:
    """A policy that asks the budget for every request, and returns an empty plan."""

    def plan(self, waiting: Sequence[Waiting], running: Sequence[Running], budget: Budget) -> Plan:
        for w in waiting:
            budget.grant(w, w.num_tokens)
        for r in running:
            budget.grant(r, r.num_remaining_tokens or 1)
        return Plan(())


def test_promise_6_empty_plans_after_grants() -> None:
    report = make(Wasteful(), starvation_steps=3, max_prefill_tokens=16).run([job(uid, 20) for uid in (1, 2, 3)])
    assert sorted(report.finished) == [1, 2, 3]


# ---- 7: all ranks execute rank 0's steps -------------------------------------------------------------


def test_promise_7_encoded_steps() -> None:
    class TwoRanks(SimEngine):
        """The engine of rank 0, which sends each step to a follower as bytes."""

        def __init__(self, *args: Any, **kwargs: Any):
            super().__init__(*args, **kwargs)
            self.follower = SimEngine(*args, **kwargs)

        def launch(self, step: Step) -> None:
            super().launch(step)
            self.follower.launch(Step.decode(step.encode()))

        def result(self) -> StepResult:
            result, followed = super().result(), self.follower.result()
            assert result.tokens.tolist() == followed.tokens.tolist()
            return result

    with no_lookahead():
        drive = make(engine=TwoRanks, spec=pool(12), max_prefill_tokens=8)
        report = drive.run([job(uid, 5 + uid, 12, first=uid % 2, abort=9 if uid == 3 else None) for uid in range(1, 7)])
    assert report.counts == drive.engine.follower.counts  # type: ignore[attr-defined]


# ---- 8: the output does not depend on other requests -------------------------------------------------

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
def test_promise_8_batching(what: str) -> None:
    """Every request gets the same tokens in a batch as alone, also when its prompt is cached."""
    alone: dict[int, list[int]] = {}
    for client in CROWD:
        alone |= make().run([client]).tokens
    with no_lookahead():
        drive = make(**VARIANTS[what])
        report = drive.run(CROWD)
        assert report.tokens == alone
        assert (report.retractions > 0) == (what == "retracted")
        warm = drive.run([Job(client.uid + 100, client.prompt, client.params) for client in CROWD])
    assert {uid - 100: tokens for uid, tokens in warm.tokens.items() if uid > 100} == alone


@pytest.mark.parametrize("overlap", [False, True])
def test_promise_8_cache_salt(overlap: bool) -> None:
    """Requests share a prefix only if their ``cache_salt`` is equal, and wait for no prefix of another salt."""
    salts = {1: None, 2: "a", 3: "b", 4: "a", 5: None}
    drive = make(overlap=overlap, spec=pool(60, max_running_requests=5), max_prefill_tokens=8192)
    for uid, salt in salts.items():
        params = SamplingParams(max_tokens=5, temperature=0.0, cache_salt=salt)
        drive.add(Job(uid, job(1, 18).prompt, params))
    drive.step()
    assert {req.uid for req in drive.scheduler.request_table.reqs} == {1, 2, 3}
    cached = {uid: end.cached_tokens for uid, end in drive.run([]).finished.items()}
    assert cached == {1: 0, 2: 0, 3: 0, 4: 16, 5: 16}


def test_promise_8_seed() -> None:
    params = SamplingParams(max_tokens=12, seed=1234)
    alone = make().run([Job(1, [4, 5, 6], params)]).tokens[1]
    others = [Job(uid, [4, 5, 6], SamplingParams(max_tokens=12, seed=uid)) for uid in (2, 3)]
    together = make().run([*others, Job(1, [4, 5, 6], params)])
    assert together.tokens[1] == alone
    assert together.tokens[2] != together.tokens[3] != alone


# ---- 9: the pool is whole when idle ------------------------------------------------------------------


@pytest.mark.parametrize("cache", ["naive", "radix"])
def test_promise_9_pool_is_whole_when_idle(cache: str) -> None:
    with no_lookahead():
        drive = make(cache=cache, spec=pool(12))
        for wave in range(4):
            drive.run([job(10 * wave + uid, 5 + uid, 12, abort=7 if uid == 2 else None) for uid in range(1, 5)])
            now = drive.scheduler.stats()
            assert now["num_free_pages"] + now["num_cached_pages"] + now["num_retiring_pages"] == now["num_pages"] == 12
            assert (now["num_running_reqs"], now["num_waiting_reqs"], now["num_in_flight_steps"]) == (0, 0, 0)
            assert now["num_cached_pages"] == now["num_evictable_pages"]
        drive.check_whole_pool()


def test_promise_9_scheduler_checks_the_idle_pool() -> None:
    """When the scheduler becomes idle, the scheduler itself raises an error if a page is lost."""
    drive = make()
    drive.add(job(1))
    drive.step()
    drive.scheduler.cache_manager.allocator.allocate(1, owner=99)
    with pytest.raises(PageOwnershipError, match="pages are lost"):  # noqa: PT012
        while drive.scheduler.has_work:
            drive.scheduler.step()
