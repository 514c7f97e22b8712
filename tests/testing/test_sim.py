"""Tests of the simulated engine with steps written by hand: correct steps pass, and each broken rule is reported."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from minisgl.core import PENDING, Admission, EngineDeadError, EngineSpec, SamplingParams, Step, TokenMasks
from minisgl.testing import RULES, SimCounts, SimEngine, SimRequest, SimViolation, expected_output
from minisgl.testing.form import check_form
from minisgl.testing.truth import ExpectedTokens

SPEC = EngineSpec(page_size=4, num_pages=8, max_running_requests=3, max_seq_len=16, vocab_size=100)
A, B, C = 7, 8, 9
REQUESTS = {
    A: SimRequest([1, 2, 3, 4, 5, 6], SamplingParams(max_tokens=5)),
    B: SimRequest([1, 2, 3, 4, 60], SamplingParams(max_tokens=3)),
    C: SimRequest([30, 31, 32, 33, 34, 35, 36, 37, 38], SamplingParams(max_tokens=3, seed=5)),
}
Row = tuple[int, int, Sequence[int], int]  # req_pool_idx, start, tokens, positions that sample


def ints(values: Sequence[int]) -> np.ndarray:
    return np.asarray(values, np.int32)


def make(
    step_id: int,
    rows: Sequence[Row],
    updates: Sequence[tuple[int, int, int]] = (),
    admissions: Sequence[tuple[int, int]] = (),
    decode: int = 0,
    verify: int = 0,
    **more: Any,
) -> Step:
    """Build a step.

    ``rows`` are (req_pool_idx, start, tokens, whether or at how many positions the row samples), ``updates`` are page
    table updates (req_pool_idx, column, page), and ``admissions`` are (req_pool_idx, uid).
    """
    indices, columns, pages = (ints([update[i] for update in updates]) for i in range(3))
    return Step(
        id=step_id,
        req_pool_indices=ints([row[0] for row in rows]),
        num_computed_tokens=ints([row[1] for row in rows]),
        num_scheduled_tokens=ints([len(row[2]) for row in rows]),
        num_sampled_tokens=ints([row[3] for row in rows]),
        num_decode=decode,
        num_verify=verify,
        input_ids=ints([token for row in rows for token in row[2]]),
        page_table_updates=(indices, columns, pages),
        admissions=tuple(
            Admission(index, uid, REQUESTS[uid].params, seed=REQUESTS[uid].params.seed or 0)
            for index, uid in admissions
        ),
        **more,
    )


def prompt(uid: int) -> list[int]:
    return list(REQUESTS[uid].prompt)


def answer(uid: int) -> list[int]:
    return expected_output(REQUESTS[uid], SPEC.vocab_size).tokens


def engine(depth: int = 2, eos: Sequence[int] = ()) -> SimEngine:
    return SimEngine(SPEC, REQUESTS, depth=depth, eos_ids=eos)


def run(sim: SimEngine, *steps: Step) -> list[int]:
    """Launch each step and read its result before the next. Return the tokens of the last step."""
    tokens: list[int] = []
    for step in steps:
        sim.launch(step)
        tokens = [int(t) for t in sim.result().tokens[:, 0]]
    return tokens


A_PREFILL = make(0, [(0, 0, prompt(A), True)], [(0, 0, 0), (0, 1, 1)], [(0, A)])
A_DECODE = make(1, [(0, 6, [PENDING], True)], decode=1)


def broken(rule: str, sim: SimEngine, *steps: Step, launch_first: bool = False) -> SimViolation:
    """Run ``steps``, which must break ``rule``, and return the violation.

    With ``launch_first``, launch each step before the result of the previous step is read.
    """
    with pytest.raises(SimViolation) as caught:  # noqa: PT012
        if launch_first:
            sim.launch(steps[0])
            for step in steps[1:]:
                sim.launch(step)
                sim.result()
            sim.result()
        else:
            run(sim, *steps)
    violation = caught.value
    assert violation.rule == rule, str(violation)
    assert RULES[rule] in str(violation)
    return violation


# ---- correct steps ------------------------------------------------------------------------------------


def test_one_request() -> None:
    """A request that runs alone gets its expected output."""
    sim = engine()
    out = run(sim, A_PREFILL)
    for i in range(1, 5):
        table = [(0, 2, 2)] if i == 3 else []
        out += run(sim, make(i, [(0, 5 + i, [PENDING if i % 2 else out[-1]], True)], table, decode=1))
    assert out == answer(A)
    assert sim.counts.tokens == 6 + 4
    assert sim.counts.prompt_tokens == 6
    assert sim.counts.recomputed == 0


def test_chunks_and_shared_prefix() -> None:
    """Requests with a shared prefix, computed in chunks and with overlap, get their expected outputs."""
    sim = engine()
    sim.launch(make(0, [(0, 0, prompt(A)[:4], False)], [(0, 0, 3)], [(0, A)]))
    sim.launch(make(1, [(0, 4, [5, 6], True), (2, 4, [60], True)], [(0, 1, 5), (2, 0, 3), (2, 1, 1)], [(2, B)]))
    assert sim.unread == 2
    first = sim.result()
    assert first.accepted.tolist() == [0]
    sim.launch(make(2, [(2, 5, [PENDING], True), (0, 6, [PENDING], True)], decode=2))
    second, third = sim.result(), sim.result()
    assert second.accepted.tolist() == [1, 1]
    assert [second.tokens[0, 0], third.tokens[1, 0]] == answer(A)[:2]
    assert [second.tokens[1, 0], third.tokens[0, 0]] == answer(B)[:2]


def test_retracted_request() -> None:
    """A retracted request continues its output in another request-pool row."""
    sim = engine()
    out = run(sim, A_PREFILL, A_DECODE)
    known = [*prompt(A), answer(A)[0], out[0]]
    resumed = make(2, [(1, 0, known, True)], [(1, 0, 4), (1, 1, 5)], [(1, A)])
    assert run(sim, resumed) == [answer(A)[2]]
    assert sim.counts.recomputed == 7


def test_token_sampled_again() -> None:
    """A token that was in flight when its request was retracted may be sampled again."""
    sim = engine()
    again = make(2, [(1, 0, [*prompt(A), answer(A)[0]], True)], [(1, 0, 4), (1, 1, 5)], [(1, A)])
    assert run(sim, A_PREFILL, A_DECODE, again) == [answer(A)[1]]


# ---- the order of calls -----------------------------------------------------------------------------------


def test_step_ids() -> None:
    """A gap in the step numbers is reported."""
    broken("step-id", engine(), replace(A_PREFILL, id=1))


@pytest.mark.parametrize("depth", [1, 2])
def test_unread_steps(depth: int) -> None:
    """More than ``depth`` launched steps in flight are reported."""
    sim = engine(depth)
    for step in (A_PREFILL, A_DECODE)[:depth]:
        sim.launch(step)
    with pytest.raises(SimViolation, match="unread-steps"):
        sim.launch(make(depth, [(0, 6 + depth, [PENDING], True)], decode=1))


def test_result_without_launch() -> None:
    """A call of ``result`` without a step in flight is reported."""
    with pytest.raises(SimViolation, match="unread-steps"):
        engine().result()


def test_dead_engine() -> None:
    """A closed engine and an engine with ``dies_at`` raise `EngineDeadError`."""
    sim = engine()
    sim.close()
    with pytest.raises(EngineDeadError):
        sim.launch(A_PREFILL)
    dying = SimEngine(SPEC, REQUESTS, dies_at=1)
    run(dying, A_PREFILL)
    with pytest.raises(EngineDeadError):
        dying.launch(A_DECODE)


@pytest.mark.parametrize(
    "array",
    [
        "req_pool_indices",
        "num_computed_tokens",
        "num_scheduled_tokens",
        "num_sampled_tokens",
        "input_ids",
        "page_table_updates",
    ],
)
def test_changed_step(array: str) -> None:
    """A step whose arrays change after the launch is reported."""
    sim = engine()
    step = make(0, [(0, 0, prompt(A), True)], [(0, 0, 0), (0, 1, 1)], [(0, A)])
    sim.launch(step)
    target = step.page_table_updates[2] if array == "page_table_updates" else getattr(step, array)
    target[0] = not target[0]
    with pytest.raises(SimViolation) as caught:
        sim.result()
    assert (caught.value.rule, caught.value.step) == ("step-changed", 0)


# ---- the shape of a step ------------------------------------------------------------------------------------

SHAPES: dict[str, Callable[[], Step]] = {
    "no rows": lambda: make(0, []),
    "an empty row": lambda: make(0, [(0, 0, [], False)], admissions=[(0, A)]),
    "an unknown req_pool_idx": lambda: make(0, [(3, 0, [1], False)]),
    "a negative req_pool_idx": lambda: make(0, [(-1, 0, [1], False)]),
    "a req_pool_idx twice": lambda: make(0, [(0, 0, [1], False), (0, 1, [2], False)], [(0, 0, 0)], [(0, A)]),
    "a decode row of two tokens": lambda: make(0, [(0, 0, [1, 2], False)], decode=1),
    "a pending token in a chunk": lambda: make(0, [(0, 0, [PENDING, 2], False)]),
    "too few tokens": lambda: replace(A_PREFILL, input_ids=A_PREFILL.input_ids[:-1]),
    "int64": lambda: replace(A_PREFILL, num_computed_tokens=A_PREFILL.num_computed_tokens.astype(np.int64)),
    "a sample flag too many": lambda: replace(A_PREFILL, num_sampled_tokens=ints([1, 1])),
    "more decode rows than rows": lambda: replace(A_PREFILL, num_decode=2),
}


@pytest.mark.parametrize("what", SHAPES)
def test_malformed_step(what: str) -> None:
    """A step whose arrays have wrong lengths, dtypes or values is reported."""
    broken("row-shape", engine(), SHAPES[what]())


@pytest.mark.parametrize("write", [(3, 0, 0), (0, 4, 0), (0, 0, 8), (0, 0, -1), (0, -1, 0)])
def test_page_table_bounds(write: tuple[int, int, int]) -> None:
    """A page table update out of bounds is reported."""
    broken("table-write", engine(), make(0, [(0, 0, [1], False)], [write], [(0, A)]))


def test_position_without_page() -> None:
    """A position without a page in the page table is reported."""
    step = make(0, [(0, 0, prompt(A), True)], [(0, 0, 0)], [(0, A)])
    violation = broken("table-missing", engine(), step)
    assert (violation.uid, violation.req_pool_idx, violation.position) == (A, 0, 4)


def test_page_table_of_earlier_request() -> None:
    """Page table entries of the row's earlier request do not count."""
    step = make(1, [(0, 0, prompt(B), True)], [(0, 0, 5)], [(0, B)])
    broken("table-missing", engine(), A_PREFILL, step)


ADMISSIONS: dict[str, Callable[[], Step]] = {
    "no admission": lambda: make(0, [(0, 0, [1], False)], [(0, 0, 0)]),
    "two requests in one row": lambda: make(0, [(0, 0, [1], False)], [(0, 0, 0)], [(0, A), (0, B)]),
    "an unknown request": lambda: replace(A_PREFILL, admissions=(Admission(0, 99, SamplingParams(), 0),)),
    "other parameters": lambda: replace(A_PREFILL, admissions=(Admission(0, A, SamplingParams(max_tokens=9), 0),)),
    "an unknown row": lambda: replace(A_PREFILL, admissions=(Admission(3, A, REQUESTS[A].params, 0),)),
}


@pytest.mark.parametrize("what", ADMISSIONS)
def test_wrong_admission(what: str) -> None:
    """A wrong admission is reported."""
    broken("admission", engine(), ADMISSIONS[what]())


def test_changed_seed() -> None:
    """A seed that changes when a request is admitted again is reported."""
    again = make(1, [(1, 0, [*prompt(A), answer(A)[0]], True)], [(1, 0, 4), (1, 1, 5)], [(1, A)])
    admission = replace(again.admissions[0], seed=1)
    assert broken("admission", engine(), A_PREFILL, replace(again, admissions=(admission,))).uid == A


def test_penalty_history() -> None:
    """An admission of a request with a penalty needs the tokens so far."""
    params = SamplingParams(max_tokens=5, presence_penalty=1.0)
    requests = {A: SimRequest(prompt(A), params)}
    for history, valid in ((prompt(A), True), (None, False), (prompt(A)[:-1], False)):
        admission = Admission(0, A, params, 0, prompt_ids=None if history is None else ints(history))
        sim = SimEngine(SPEC, requests)
        sim.launch(replace(A_PREFILL, admissions=(admission,)))
        if valid:
            sim.result()
        else:
            with pytest.raises(SimViolation, match="admission"):
                sim.result()


# ---- owners of request-pool rows and pages ----------------------------------------------------------------


def test_row_reused_in_flight() -> None:
    """A request-pool row that is reused while a step may write a token to it is reported."""
    step = make(1, [(0, 0, prompt(B), True)], [(0, 0, 4), (0, 1, 5)], [(0, B)])
    violation = broken("row-in-flight", engine(), A_PREFILL, step, launch_first=True)
    assert (violation.step, violation.uid, violation.req_pool_idx) == (1, B, 0)
    run(engine(), A_PREFILL, step)


@pytest.mark.parametrize("page", [0, 1])
def test_page_written_in_flight(page: int) -> None:
    """A write to a page that a step in flight accesses is reported."""
    step = make(1, [(1, 0, prompt(B), True)], [(1, 0, 5), (1, 1, page)], [(1, B)])
    violation = broken("page-in-flight", engine(), A_PREFILL, step, launch_first=True)
    assert (violation.step, violation.uid, violation.page) == (1, B, page)
    run(engine(), A_PREFILL, step)


def test_two_writers() -> None:
    """Two rows that write to one page are reported."""
    rows: list[Row] = [(0, 0, prompt(A), True), (1, 0, prompt(C), True)]
    table = [(0, 0, 0), (0, 1, 1), (1, 0, 2), (1, 1, 3), (1, 2, 1)]
    assert broken("page-shared", engine(), make(0, rows, table, [(0, A), (1, C)])).page == 1


def test_page_twice_in_row() -> None:
    """A page that is twice in a page table row is reported."""
    broken("page-shared", engine(), make(0, [(0, 0, prompt(A), True)], [(0, 0, 1), (0, 1, 1)], [(0, A)]))


def test_reader_and_writer() -> None:
    """A page that one row reads and another row writes is reported."""
    rows: list[Row] = [(0, 0, prompt(A), True), (1, 4, [60], True)]
    table = [(0, 0, 0), (0, 1, 1), (1, 0, 0), (1, 1, 2)]
    assert broken("page-shared", engine(), make(0, rows, table, [(0, A), (1, B)])).page == 0


def test_retired_page_with_right_content() -> None:
    """A page table that points to a retired page is reported, even if the page has the right content."""
    # B is given page 0 of A, and writes the same four tokens that A wrote there.
    writer = make(1, [(1, 0, prompt(B), True)], [(1, 0, 0), (1, 1, 2)], [(1, B)])
    reader = make(2, [(0, 6, [PENDING], True)], decode=1)
    violation = broken("page-retired", engine(), A_PREFILL, writer, reader)
    assert (violation.row, violation.uid, violation.page, violation.position) == (0, A, 0, 0)


def test_retired_page_in_same_step() -> None:
    """A retired page in a page table is reported in the step in which its new owner writes it."""
    rows: list[Row] = [(0, 6, [PENDING], True), (1, 0, prompt(B), True)]
    step = make(1, rows, [(1, 0, 0), (1, 1, 2)], [(1, B)], decode=1)
    violation = broken("page-retired", engine(), A_PREFILL, step)
    assert (violation.row, violation.uid, violation.page, violation.position) == (0, A, 0, 0)


def test_remap_before_reuse() -> None:
    """A duplicate page may be reused after the page table points to the cached page instead."""
    sim = engine()
    both = make(
        0,
        [(0, 0, prompt(A), True), (1, 0, prompt(B), True)],
        [(0, 0, 0), (0, 1, 1), (1, 0, 2), (1, 1, 3)],
        [(0, A), (1, B)],
    )
    remap = make(1, [(1, 5, [PENDING], True)], [(1, 0, 0)], decode=1)
    rows: list[Row] = [(1, 6, [PENDING], True), (2, 0, prompt(C)[:4], False)]
    reuse = make(2, rows, [(2, 0, 2)], [(2, C)], decode=1)
    assert run(sim, both, remap, reuse)[0] == answer(B)[2]


# ---- what a row computes -------------------------------------------------------------------------------------------


def test_position_past_max_seq_len() -> None:
    """A position beyond the longest sequence is reported."""
    long = SimRequest(list(range(14)), SamplingParams(max_tokens=9))
    sim = SimEngine(SPEC, {A: long})
    table = [(0, i, i) for i in range(4)]
    row: list[Row] = [(0, 0, [*long.prompt, 1, 2, 3], True)]
    admission = Admission(0, A, long.params, 0)
    assert broken("position", sim, replace(make(0, row, table), admissions=(admission,))).uid == A


def test_kv_of_last_token() -> None:
    """A step that computes the KV of a request's last token is reported."""
    sim = engine()
    run(sim, make(0, [(0, 0, prompt(B), True)], [(0, 0, 0), (0, 1, 1)], [(0, B)]))
    run(sim, *(make(i, [(0, 4 + i, [PENDING], True)], decode=1) for i in (1, 2)))
    broken("position", sim, make(3, [(0, 7, [PENDING], True)], decode=1))


@pytest.mark.parametrize("start", [4, 5, 7])
def test_wrong_start(start: int) -> None:
    """A row that does not start where the request's last row ended is reported."""
    token = ExpectedTokens(REQUESTS[A], SPEC.vocab_size)[start]
    step = make(1, [(0, start, [token], True)], decode=1)
    assert broken("start", engine(), A_PREFILL, step).position == start


def test_skipped_prefix() -> None:
    """A row that skips a prefix that was never computed is reported."""
    step = make(0, [(0, 4, [5, 6], True)], [(0, 0, 0), (0, 1, 1)], [(0, A)])
    violation = broken("kv-content", engine(), step)
    assert (violation.position, violation.page) == (0, 0)
    assert "never written" in violation.text


def test_other_prefix() -> None:
    """A row that reads another request's KV is reported, with the other request's uid."""
    c = make(1, [(1, 4, prompt(C)[4:], True)], [(1, 0, 0), (1, 1, 4), (1, 2, 5)], [(1, C)])
    violation = broken("kv-content", engine(), A_PREFILL, c)
    assert violation.page == 0
    assert f"the KV of request {A} at position 0" in violation.text


def test_wrong_input_token() -> None:
    """A wrong input token is reported."""
    step = make(0, [(0, 0, [1, 2, 3, 9, 5, 6], True)], [(0, 0, 0), (0, 1, 1)], [(0, A)])
    violation = broken("input-token", engine(), step)
    assert (violation.position, violation.text) == (3, "the input token is 9, expected 4")


def test_missing_pending_token() -> None:
    """A PENDING input is reported if no token was sampled for the request-pool row."""
    chunk = make(0, [(0, 0, prompt(A)[:4], False)], [(0, 0, 0), (0, 1, 1)], [(0, A)])
    violation = broken("input-token", engine(), chunk, make(1, [(0, 4, [PENDING], True)], decode=1))
    assert "no token was sampled" in violation.text


def test_token_before_sampling() -> None:
    """An output token in the input that was not sampled yet is reported."""
    known = [*prompt(A), answer(A)[0]]
    step = make(0, [(0, 0, known, True)], [(0, 0, 0), (0, 1, 1)], [(0, A)])
    assert broken("input-token", engine(), step).position == 6


def test_sample_before_prompt_end() -> None:
    """A row that samples before the end of the prompt is reported."""
    broken("sample", engine(), make(0, [(0, 0, prompt(A)[:4], True)], [(0, 0, 0)], [(0, A)]))


def test_no_sample_at_prompt_end() -> None:
    """A row that computes the end of the prompt without sampling is reported."""
    broken("sample", engine(), make(0, [(0, 0, prompt(A), False)], [(0, 0, 0), (0, 1, 1)], [(0, A)]))


def test_row_after_end() -> None:
    """A row of a finished request is reported, unless the step was launched before the last token was read."""
    eos = answer(A)[1]
    third = make(2, [(0, 7, [PENDING], True)], decode=1)
    sim = engine(eos=[eos])
    run(sim, A_PREFILL)
    sim.launch(A_DECODE)
    sim.launch(third)  # before the result that ends the request is read
    sim.result()
    sim.result()
    violation = broken("row-after-end", sim, make(3, [(0, 8, [PENDING], True)], [(0, 2, 2)], decode=1))
    assert (violation.uid, violation.step) == (A, 3)


def test_counts() -> None:
    """`SimCounts` counts prompt, output and recomputed positions separately."""
    sim = engine()
    run(sim, A_PREFILL, A_DECODE)
    counts = SimCounts(steps=2, rows=2, tokens=7, prompt_tokens=6, max_rows=1, max_tokens=6)
    assert sim.counts == dataclasses.replace(counts, admissions={A: 1}, computed_by={A: 7})


def test_masks_of_a_wrong_shape() -> None:
    """Masks with a wrong number of words are reported, also if there are none."""
    sim = engine()
    sim.launch(replace(A_PREFILL, late_sampling=True))
    with pytest.raises(SimViolation, match="expected int32") as caught:
        sim.sample(TokenMasks(np.empty(0, np.int32), np.empty((0, 0), np.int32)))
    assert caught.value.rule == "mask"


def test_calls_in_the_wrong_order() -> None:
    """A late step must be sampled before its result is read, before the next launch, and once."""
    none = TokenMasks(np.empty(0, np.int32), np.empty((0, -(-SPEC.vocab_size // 32)), np.int32))
    late = replace(A_PREFILL, late_sampling=True)
    for calls in (
        lambda sim: (sim.launch(late), sim.result()),
        lambda sim: (sim.launch(late), sim.launch(make(1, [(0, 6, [PENDING], True)], decode=1))),
        lambda sim: (sim.launch(late), sim.sample(none), sim.sample(none)),
        lambda sim: (sim.launch(A_PREFILL), sim.sample(none)),
        lambda sim: sim.sample(none),
    ):
        with pytest.raises(SimViolation) as caught:
            calls(engine())
        assert caught.value.rule == "late-sampling"


def test_row_of_a_request_whose_verification_is_unread() -> None:
    """No row of a request is launched before its verification was read: only the result says where it begins."""
    sim, first = engine(), answer(A)
    run(sim, A_PREFILL)
    drafts = [PENDING, first[1], first[2]]
    verify = make(1, [(0, 6, drafts, 3)], [(0, 2, 2)], verify=1)
    sim.launch(verify)
    sim.launch(make(2, [(0, 9, [PENDING], True)], decode=1))
    assert sim.result().accepted.tolist() == [3]
    with pytest.raises(SimViolation) as caught:
        sim.result()
    assert caught.value.rule == "verify-unread"


# ---- rounds ---------------------------------------------------------------------------------------------------


def verify(start: int, drafts: int, updates: Sequence[tuple[int, int, int]] = (), **more: Any) -> Step:
    """Return a step that verifies ``drafts`` drafts of request A, of which the first is right."""
    stream = ExpectedTokens(REQUESTS[A], SPEC.vocab_size)
    tokens = [PENDING, stream[start + 1], *[0] * (drafts - 1)]
    return make(1, [(0, start, tokens, 1 + drafts)], updates, verify=1, **more)


def test_rounds_follow_each_other() -> None:
    """The tokens of a round follow those of the round before it."""
    sim = engine()
    run(sim, A_PREFILL)
    sim.launch(verify(6, 1, [(0, 2, 2)], rounds=2))
    result = sim.result()
    assert result.rounds is not None and result.rounds[0].tolist() == [2]
    count = int(result.rounds.sum())
    assert result.accepted.tolist() == [count]
    assert result.tokens[0, :count].tolist() == answer(A)[1 : 1 + count]
    assert result.tokens.shape == (1, 4)
    assert sim.counts.later_rounds == 1
    assert sim.counts.tokens == 6 + 4


def test_rounds_behind_the_longest_answer() -> None:
    """A step whose last round could compute the KV of the last token is reported."""
    violation = broken("position", engine(), A_PREFILL, verify(6, 1, [(0, 2, 2)], rounds=3))
    assert "positions 6 to 11" in violation.text


def test_pages_of_the_first_round_only() -> None:
    """A step without pages for its later rounds is reported."""
    assert broken("table-missing", engine(), A_PREFILL, verify(6, 1, rounds=2)).position == 8


ROUNDS: dict[str, Callable[[], Step]] = {
    "no round": lambda: verify(6, 1, rounds=0),
    "a prefill chunk": lambda: replace(A_PREFILL, rounds=2),
    "a decode row": lambda: replace(A_DECODE, rounds=2),
    "a decode row beside a verification row": lambda: make(
        1, [(1, 6, [PENDING], 1), (0, 6, [PENDING, 1], 2)], decode=1, verify=1, rounds=2
    ),
    "a prefill chunk beside a verification row": lambda: make(
        1, [(0, 6, [PENDING, 1], 2), (1, 0, [1, 2], 0)], verify=1, rounds=2
    ),
    "rows with different numbers of drafts": lambda: make(
        1, [(0, 6, [PENDING, 1], 2), (1, 6, [PENDING, 1, 2], 3)], verify=2, rounds=2
    ),
    "late sampling": lambda: verify(6, 1, rounds=2, late_sampling=True),
}


@pytest.mark.parametrize("what", ROUNDS)
def test_step_that_can_have_no_rounds(what: str) -> None:
    step = ROUNDS[what]()
    with pytest.raises(SimViolation, match=f"has {step.rounds} rounds") as caught:
        check_form(step, SPEC)
    assert caught.value.rule == "row-shape"
    check_form(replace(step, rounds=1), SPEC)
