"""Verification in rounds: which steps have several, and that no request gets other tokens because of it."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import msgspec
import numpy as np
import pytest

from minisgl.core import EngineSpec, Step, StepResult
from minisgl.plugins.speculation import accepted_by_round
from minisgl.plugins.speculation.adaptive import AdaptiveSpeculation, StepTimes
from minisgl.testing.drive import Drive, Job, make_plugin
from minisgl.testing.sim import SimEngine
from minisgl.testing.small import job, no_lookahead
from minisgl.testing.truth import expected_output

ROOMY = EngineSpec(page_size=4, num_pages=200, max_running_requests=4, max_seq_len=400, vocab_size=50)


class Seen(SimEngine):
    """A simulated engine that keeps its steps and their results."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.steps: list[Step] = []
        self.results: list[StepResult] = []

    def launch(self, step: Step) -> None:
        self.steps.append(step)
        super().launch(step)

    def result(self) -> StepResult:
        self.results.append(super().result())
        return self.results[-1]


def drive(
    spec: EngineSpec = ROOMY,
    rounds: int = 3,
    drafts: tuple[int, int, int] = (3, 60, 1),
    policy: str = "mixed",
    **more: Any,
) -> Drive:
    plugins = make_plugin("cache", "radix", page_size=spec.page_size), make_plugin("scheduler", policy)
    return Drive(spec, *plugins, drafts=drafts, rounds=rounds, engine=Seen, **{"full_drafts": True, **more})


def steps(drive: Drive) -> list[Step]:
    return drive.engine.steps  # type: ignore[attr-defined, no-any-return]


def results(drive: Drive) -> list[StepResult]:
    return drive.engine.results  # type: ignore[attr-defined, no-any-return]


def rounds(drive: Drive) -> list[int]:
    """Return the number of rounds of each step that verifies."""
    return [step.rounds for step in steps(drive) if step.num_verify]


def with_params(job: Job, **params: Any) -> Job:
    return replace(job, params=msgspec.structs.replace(job.params, **params))


# ---- outputs -----------------------------------------------------------------------------------------------


def workload(random: Random, spec: EngineSpec) -> list[Job]:
    """Return up to nine requests with common prefixes, of which some are aborted."""
    room, jobs = min(spec.max_seq_len, spec.num_pages * spec.page_size), []
    for uid in range(random.randrange(3, 10)):
        length = random.randrange(1, room // 2)
        arrive = random.choice([0, 0, 0, 5, 40])
        abort = arrive + random.randrange(30) if random.random() < 0.2 else None
        one = job(uid, length, random.randrange(1, room - length + 1), first=uid % 3, arrive=arrive, abort=abort)
        jobs.append(with_params(one, stop_token_ids=random.choice([(), (), (0, 17)]), ignore_eos=random.random() < 0.7))
    return jobs


@pytest.mark.parametrize("adapt", [False, True], ids=["all drafts", "adapted"])
@pytest.mark.parametrize("overlap", [False, True], ids=["no overlap", "overlap"])
@pytest.mark.parametrize("most", [2, 3, 8])
def test_outputs_are_those_without_rounds(most: int, overlap: bool, adapt: bool) -> None:
    """Each request gets its expected tokens, in pools of any page size, also if pages run out."""
    repeated = aborted = stopped = retracted = 0
    for seed in range(15):
        random = Random(f"{seed} {most}")
        page_size = random.choice([1, 3, 4, 16])
        pages = -(-random.choice([50, 90, 300]) // page_size)
        spec = EngineSpec(page_size, pages, random.randrange(1, 5), min(pages * page_size, 120), 50)
        drafts = random.choice([1, 3, 6]), random.choice([30, 60, 95]), seed
        full = random.random() < 0.8
        options: dict[str, Any] = {"overlap": overlap, "adapt_drafts": adapt, "eos_ids": (7,), "full_drafts": full}
        with no_lookahead():
            simulated = drive(spec, most, drafts, random.choice(["mixed", "prefill_first"]), **options)
            report = simulated.run(workload(random, spec))
        assert max(rounds(simulated), default=1) <= most
        repeated += report.counts.later_rounds
        retracted += report.retractions
        reasons = [reply.finish_reason for reply in report.finished.values()]
        aborted, stopped = aborted + reasons.count("abort"), stopped + reasons.count("stop")
    print(repeated, aborted, stopped, retracted)
    assert repeated > 50
    assert min(aborted, stopped, retracted) > 5


@pytest.mark.parametrize("overlap", [False, True], ids=["no overlap", "overlap"])
def test_stop_token_in_any_round(overlap: bool) -> None:
    """A request ends with its stop token, whichever round has it, and later rounds count for nothing."""
    ended_in = set()
    for seed in range(30):
        one = job(1, 9, 200, first=seed)
        expected = expected_output(one.request, ROOMY.vocab_size).tokens
        token = next(token for k, token in enumerate(expected) if k > 5 + seed % 7 and token not in expected[:k])
        simulated = drive(rounds=4, drafts=(2, 80, seed), overlap=overlap)
        report = simulated.run([with_params(one, stop_token_ids=(token,))])
        assert report.finished[1].finish_reason == "stop"
        assert report.tokens[1].index(token) == len(report.tokens[1]) - 1
        counted = [accepted_by_round(result, 0) for result in results(simulated) if result.rounds is not None]
        ended_in.add(len(counted[-1]))
        stats = simulated.scheduler.stats()
        assert stats["verification_rows"] == sum(map(len, counted))
        assert stats["draft_tokens"] == 2 * sum(map(len, counted)) <= report.counts.drafts
        assert stats["accepted_draft_tokens"] == sum(map(sum, counted)) - sum(map(len, counted))
    assert ended_in == {1, 2, 3, 4}


@pytest.mark.parametrize("overlap", [False, True], ids=["no overlap", "overlap"])
def test_no_round_computes_behind_the_longest_answer(overlap: bool) -> None:
    """The last steps have only as many rounds as the largest number of their tokens has room for."""
    seen = set()
    for answer in range(2, 40):
        simulated = drive(rounds=3, drafts=(3, 100, 1), overlap=overlap)
        report = simulated.run([job(1, 9, answer)])
        assert report.finished[1].output_tokens == answer
        for step in steps(simulated):
            if step.num_verify:
                room, width = 9 + answer - 1 - int(step.num_computed_tokens[0]), int(step.num_scheduled_tokens[0])
                assert step.rounds == min(3, room // width)
                seen.add(step.rounds)
    assert seen == {1, 2, 3}


@pytest.mark.parametrize("overlap", [False, True], ids=["no overlap", "overlap"])
def test_aborted_while_a_step_of_several_rounds_is_in_flight(overlap: bool) -> None:
    """All tokens of the step are discarded, its pages become free, and other requests are not disturbed."""
    for abort in range(1, 12):
        simulated = drive(rounds=3, overlap=overlap)
        report = simulated.run([replace(job(1, 9, 90), abort=abort), job(2, 9, 60)])
        assert report.finished[1].finish_reason == "abort"
        assert report.finished[2].output_tokens == 60
        assert max(rounds(simulated)) == 3


# ---- which steps have several rounds -------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True], ids=["no overlap", "overlap"])
def test_a_batch_has_rounds_once_no_request_waits(overlap: bool) -> None:
    """While a request waits, each step has one round: the request may join the next step."""
    simulated = drive(replace(ROOMY, max_running_requests=2), overlap=overlap)
    waits = []
    launch = simulated.engine.launch

    def watch(step: Step) -> None:
        waits.append(bool(simulated.scheduler.waiting))
        launch(step)

    simulated.engine.launch = watch  # type: ignore[method-assign]
    simulated.run([job(1, 9, 90), job(2, 9, 120), job(3, 9, 60), job(4, 9, 30, arrive=60)])
    of_steps: dict[bool, list[int]] = {True: [], False: []}
    for step, waiting in zip(steps(simulated), waits, strict=True):
        if step.num_verify:
            of_steps[waiting].append(step.rounds)
    assert len(of_steps[True]) > 5
    assert set(of_steps[True]) == {1}
    assert of_steps[False].count(3) > 5


def test_rows_with_different_numbers_of_drafts_have_one_round() -> None:
    simulated = drive(full_drafts=False)
    simulated.run([job(uid, 9, 90) for uid in range(2)])
    by_width: dict[bool, list[int]] = {True: [], False: []}
    for step in steps(simulated):
        if step.num_verify:
            by_width[len(set(step.num_scheduled_tokens.tolist())) == 1 and not step.num_decode].append(step.rounds)
    assert len(by_width[False]) > 10
    assert set(by_width[False]) == {1}
    assert by_width[True].count(3) > 5


def test_prompts_beside_verification_rows_leave_one_round() -> None:
    simulated = drive(max_prefill_tokens=2)
    simulated.run([job(1, 9, 90), job(2, 40, 30, arrive=8)])
    mixed = [step.rounds for step in steps(simulated) if 0 < step.num_verify < step.rows]
    assert len(mixed) > 10
    assert set(mixed) == {1}
    assert 3 in rounds(simulated)


@pytest.mark.parametrize("beside", ["nothing", "log-probabilities", "a grammar"])
def test_requests_that_need_each_step_have_one_round(beside: str) -> None:
    """Log-probabilities are those of one round, and masks of a grammar depend on the tokens before them."""
    other = job(2, 9, 60)
    if beside == "log-probabilities":
        other = with_params(other, logprobs=0)
    elif beside == "a grammar":
        other = replace(other, grammar=1)
    simulated = drive()
    simulated.run([job(1, 9, 120), other])
    of_both = [step.rounds for step in steps(simulated) if step.num_verify == 2]
    alone = [step.rounds for step in steps(simulated) if step.num_verify and step.rows == 1]
    assert len(of_both) > 5
    assert set(of_both) <= ({1, 2, 3} if beside == "nothing" else {1})
    assert max(alone if beside != "nothing" else of_both) == 3


def test_no_round_without_pages() -> None:
    """Where pages are free for some rounds only, the step has as many, and no request gets a page for more."""
    found = {}
    for pages in (60, 24, 20, 18, 12):
        simulated = drive(EngineSpec(4, pages, 2, 80, 50), rounds=8)
        table = simulated.scheduler.request_table
        for uid in (1, 2):
            simulated.add(job(uid, 17, 31 if pages > 12 else 8))
        while all(step.num_verify < 2 for step in steps(simulated)):
            simulated.step()
        step = steps(simulated)[-1]
        found[pages] = step.rounds, table.num_pages[step.req_pool_indices].tolist()
        simulated.run([])
    # A request has 17 tokens in 5 pages. 30 positions are left: 7 rounds. One round needs 6 pages in all, 7 rounds 12.
    assert found == {60: (7, [12, 12]), 24: (7, [12, 12]), 20: (5, [10, 10]), 18: (4, [9, 9]), 12: (1, [6, 6])}


def test_pages_of_the_cache_are_used_for_rounds() -> None:
    """A lone request has as many rounds in a small pool that is full of cached pages as in a large one."""
    simulated = drive(EngineSpec(4, 20, 2, 80, 50), rounds=4)
    simulated.run([job(1, 30, 40), job(2, 9, 60, first=3, arrive=200)])
    late = [step.rounds for step in steps(simulated)[-20:] if step.num_verify]
    assert late[0] == 4


def test_one_round_is_the_default() -> None:
    simulated = drive(rounds=1)
    simulated.run([job(uid, 9, 90) for uid in range(3)])
    assert set(rounds(simulated)) == {1}
    assert all(result.rounds is None for result in results(simulated))
    assert all(a.prompt_ids is None for step in steps(simulated) for a in step.admissions)


def test_the_engine_gets_the_tokens_that_it_drafts_from() -> None:
    simulated = drive(EngineSpec(4, 14, 3, 56, 50))
    with no_lookahead():
        report = simulated.run([job(uid, 9, 30) for uid in range(1, 4)])
    assert report.retractions
    admissions = [admission for step in steps(simulated) for admission in step.admissions]
    for admission in admissions:
        assert admission.prompt_ids is not None and admission.output_ids is not None
        output = admission.output_ids.tolist()
        assert admission.prompt_ids.tolist() == list(simulated.requests[admission.uid].prompt)
        assert output == report.tokens[admission.uid][: len(output)]
    assert any(len(admission.output_ids) for admission in admissions if admission.output_ids is not None)


# ---- results ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True], ids=["no overlap", "overlap"])
def test_the_number_of_drafts_adapts_after_each_round(overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: dict[int, list[list[int]]] = {}

    def adapt(self: AdaptiveSpeculation, step_id: int, rows: Any, counts: Any, accepted: Any) -> None:
        calls.setdefault(step_id, []).append((accepted + 1).tolist())
        real(self, step_id, rows, counts, accepted)

    real = AdaptiveSpeculation._adapt
    monkeypatch.setattr(AdaptiveSpeculation, "_adapt", adapt)
    simulated = drive(overlap=overlap, adapt_drafts=True)
    simulated.run([job(uid, 9, 90) for uid in range(2)])
    for step, result in zip(steps(simulated), results(simulated), strict=True):
        if step.num_verify:
            assert len(calls[step.id]) == step.rounds
            assert calls[step.id] == ([result.accepted.tolist()] if result.rounds is None else result.rounds.tolist())
    assert 3 in rounds(simulated)


def test_counts_of_all_rounds() -> None:
    """The scheduler's counts of drafts are those of all rounds, and agree with what the engine accepted."""
    simulated = drive()
    counts = simulated.run([job(uid, 9, 90) for uid in range(3)]).counts
    stats = simulated.scheduler.stats()
    verifying = [step for step in steps(simulated) if step.num_verify]
    assert stats["verification_rows"] == sum(step.rounds * step.num_verify for step in verifying)
    assert stats["draft_tokens"] == counts.drafts
    assert stats["accepted_draft_tokens"] == counts.accepted_drafts > 50
    assert sum(stats[f"accepted_draft_tokens_per_pos_{k}"] for k in range(3)) == counts.accepted_drafts
    assert counts.later_rounds > 10
    assert stats["output_tokens"] == 270


def test_time_of_one_round() -> None:
    """Of a step of several rounds, the time of one is compared with that of a plain step."""
    times = StepTimes()
    for step in range(3):
        times.add(step, 4, 0, 4, 4, float(step))
    times.add(3, 0, 4, 16, 4, 2 + 6.0, rounds=4)
    assert sorted(time.seconds for time in times._times.values()) == [1.0, 1.5]


def test_tokens_of_each_round_up_to_the_last_that_counts() -> None:
    def by_round(accepted: int) -> list[int]:
        result = StepResult(0, np.zeros((2, 9), np.int32), np.array([9, accepted], np.int32))
        assert accepted_by_round(result, 1) == [accepted]
        return accepted_by_round(result._replace(rounds=np.array([[3, 2], [3, 1], [3, 3]], np.int32)), 1)

    assert [by_round(n) for n in range(1, 7)] == [[1], [2], [2, 1], [2, 1, 1], [2, 1, 2], [2, 1, 3]]
