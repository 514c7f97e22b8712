"""The simulated engine against steps written by hand: a healthy run passes, and each rule, broken, is named."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from minisgl.core import PENDING, Admission, EngineDeadError, EngineSpec, SamplingParams, Step
from minisgl.testing import RULES, Ask, SimCounts, SimEngine, SimViolation, expected_output
from minisgl.testing.truth import Truth

SPEC = EngineSpec(page_size=4, num_pages=8, max_running_requests=3, max_seq_len=16, vocab_size=100)
A, B, C = 7, 8, 9
REQUESTS = {
    A: Ask([1, 2, 3, 4, 5, 6], SamplingParams(max_tokens=5)),
    B: Ask([1, 2, 3, 4, 60], SamplingParams(max_tokens=3)),
    C: Ask([30, 31, 32, 33, 34, 35, 36, 37, 38], SamplingParams(max_tokens=3, seed=5)),
}
Row = tuple[int, int, Sequence[int], bool]  # slot, start, tokens, sample


def ints(values: Sequence[int]) -> np.ndarray:
    return np.asarray(values, np.int32)


def make(
    step_id: int,
    rows: Sequence[Row],
    table: Sequence[tuple[int, int, int]] = (),
    seats: Sequence[tuple[int, int]] = (),
    decode: int = 0,
) -> Step:
    """A step from rows (slot, start, tokens, sample), table writes and seats (slot, uid)."""
    slots, columns, pages = (ints([w[i] for w in table]) for i in range(3))
    return Step(
        id=step_id,
        req_pool_indices=ints([row[0] for row in rows]),
        num_computed_tokens=ints([row[1] for row in rows]),
        num_scheduled_tokens=ints([len(row[2]) for row in rows]),
        num_decode=decode,
        sample=np.asarray([row[3] for row in rows], np.bool_),
        input_ids=ints([token for row in rows for token in row[2]]),
        page_table_updates=(slots, columns, pages),
        admissions=tuple(
            Admission(slot, uid, REQUESTS[uid].params, seed=REQUESTS[uid].params.seed or 0) for slot, uid in seats
        ),
    )


def prompt(uid: int) -> list[int]:
    return list(REQUESTS[uid].prompt)


def answer(uid: int) -> list[int]:
    return expected_output(REQUESTS[uid], SPEC.vocab_size).tokens


def engine(depth: int = 2, eos: Sequence[int] = ()) -> SimEngine:
    return SimEngine(SPEC, REQUESTS, depth=depth, eos_ids=eos)


def run(sim: SimEngine, *steps: Step) -> list[int]:
    """Launch and read one step after the other; the last one's tokens."""
    tokens: list[int] = []
    for step in steps:
        sim.launch(step)
        tokens = [int(t) for t in sim.result().tokens[:, 0]]
    return tokens


A_PREFILL = make(0, [(0, 0, prompt(A), True)], [(0, 0, 0), (0, 1, 1)], [(0, A)])
A_DECODE = make(1, [(0, 6, [PENDING], True)], decode=1)


def broken(rule: str, sim: SimEngine, *steps: Step, launch_first: bool = False) -> SimViolation:
    """The violation that ``steps`` must raise; ``launch_first`` launches each before the one before it is read."""
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


# ---- healthy runs -------------------------------------------------------------------------------------


def test_a_request_alone_gets_the_expected_answer() -> None:
    sim = engine()
    out = run(sim, A_PREFILL)
    for i in range(1, 5):
        table = [(0, 2, 2)] if i == 3 else []
        out += run(sim, make(i, [(0, 5 + i, [PENDING if i % 2 else out[-1]], True)], table, decode=1))
    assert out == answer(A)
    assert sim.counts.tokens == 6 + 4
    assert sim.counts.prompt_tokens == 6
    assert sim.counts.recomputed == 0


def test_chunks_shared_prefix_and_a_step_in_flight_change_nothing() -> None:
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


def test_a_retracted_request_goes_on_where_it_was_in_another_slot() -> None:
    sim = engine()
    out = run(sim, A_PREFILL, A_DECODE)
    known = [*prompt(A), answer(A)[0], out[0]]
    resumed = make(2, [(1, 0, known, True)], [(1, 0, 4), (1, 1, 5)], [(1, A)])
    assert run(sim, resumed) == [answer(A)[2]]
    assert sim.counts.recomputed == 7


def test_a_token_that_was_in_flight_at_a_retraction_may_be_sampled_again() -> None:
    sim = engine()
    again = make(2, [(1, 0, [*prompt(A), answer(A)[0]], True)], [(1, 0, 4), (1, 1, 5)], [(1, A)])
    assert run(sim, A_PREFILL, A_DECODE, again) == [answer(A)[1]]


# ---- the order of calls -----------------------------------------------------------------------------------


def test_step_ids_have_no_gaps() -> None:
    broken("step-id", engine(), replace(A_PREFILL, id=1))


@pytest.mark.parametrize("depth", [1, 2])
def test_at_most_depth_steps_are_unread(depth: int) -> None:
    sim = engine(depth)
    for step in (A_PREFILL, A_DECODE)[:depth]:
        sim.launch(step)
    with pytest.raises(SimViolation, match="unread-steps"):
        sim.launch(make(depth, [(0, 6 + depth, [PENDING], True)], decode=1))


def test_a_result_without_a_launch_is_an_error() -> None:
    with pytest.raises(SimViolation, match="unread-steps"):
        engine().result()


def test_a_closed_engine_and_a_dying_one_say_so() -> None:
    sim = engine()
    sim.close()
    with pytest.raises(EngineDeadError):
        sim.launch(A_PREFILL)
    dying = SimEngine(SPEC, REQUESTS, dies_at=1)
    run(dying, A_PREFILL)
    with pytest.raises(EngineDeadError):
        dying.launch(A_DECODE)


@pytest.mark.parametrize("array", ["slots", "starts", "counts", "sample", "tokens", "table"])
def test_a_step_that_is_changed_after_its_launch_is_found(array: str) -> None:
    sim = engine()
    step = make(0, [(0, 0, prompt(A), True)], [(0, 0, 0), (0, 1, 1)], [(0, A)])
    sim.launch(step)
    target = step.page_table_updates[2] if array == "table" else getattr(step, array)
    target[0] = not target[0]
    with pytest.raises(SimViolation) as caught:
        sim.result()
    assert (caught.value.rule, caught.value.step) == ("step-changed", 0)


# ---- the form of a step -------------------------------------------------------------------------------------

SHAPES: dict[str, Callable[[], Step]] = {
    "no rows": lambda: make(0, []),
    "an empty row": lambda: make(0, [(0, 0, [], False)], seats=[(0, A)]),
    "a slot that is not there": lambda: make(0, [(3, 0, [1], False)]),
    "the scratch slot": lambda: make(0, [(-1, 0, [1], False)]),
    "one slot twice": lambda: make(0, [(0, 0, [1], False), (0, 1, [2], False)], [(0, 0, 0)], [(0, A)]),
    "a decode row of two tokens": lambda: make(0, [(0, 0, [1, 2], False)], decode=1),
    "a pending token in a chunk": lambda: make(0, [(0, 0, [PENDING, 2], False)]),
    "too few tokens": lambda: replace(A_PREFILL, input_ids=A_PREFILL.input_ids[:-1]),
    "int64": lambda: replace(A_PREFILL, num_computed_tokens=A_PREFILL.num_computed_tokens.astype(np.int64)),
    "a sample flag too many": lambda: replace(A_PREFILL, sample=np.ones(2, np.bool_)),
    "more decode rows than rows": lambda: replace(A_PREFILL, num_decode=2),
}


@pytest.mark.parametrize("what", SHAPES)
def test_a_malformed_step_is_found(what: str) -> None:
    broken("row-shape", engine(), SHAPES[what]())


@pytest.mark.parametrize("write", [(3, 0, 0), (0, 4, 0), (0, 0, 8), (0, 0, -1), (0, -1, 0)])
def test_a_table_write_out_of_bounds_is_found(write: tuple[int, int, int]) -> None:
    broken("table-write", engine(), make(0, [(0, 0, [1], False)], [write], [(0, A)]))


def test_a_position_without_a_page_is_found() -> None:
    step = make(0, [(0, 0, prompt(A), True)], [(0, 0, 0)], [(0, A)])
    violation = broken("table-missing", engine(), step)
    assert (violation.uid, violation.slot, violation.position) == (A, 0, 4)


def test_a_table_row_of_the_one_before_does_not_count() -> None:
    step = make(1, [(0, 0, prompt(B), True)], [(0, 0, 5)], [(0, B)])
    broken("table-missing", engine(), A_PREFILL, step)


SEATS: dict[str, Callable[[], Step]] = {
    "nobody there": lambda: make(0, [(0, 0, [1], False)], [(0, 0, 0)]),
    "two in one slot": lambda: make(0, [(0, 0, [1], False)], [(0, 0, 0)], [(0, A), (0, B)]),
    "unknown": lambda: replace(A_PREFILL, admissions=(Admission(0, 99, SamplingParams(), 0),)),
    "other parameters": lambda: replace(A_PREFILL, admissions=(Admission(0, A, SamplingParams(max_tokens=9), 0),)),
    "no such slot": lambda: replace(A_PREFILL, admissions=(Admission(3, A, REQUESTS[A].params, 0),)),
}


@pytest.mark.parametrize("what", SEATS)
def test_a_wrong_seat_is_found(what: str) -> None:
    broken("seat", engine(), SEATS[what]())


def test_another_seed_at_the_second_seat_is_found() -> None:
    again = make(1, [(1, 0, [*prompt(A), answer(A)[0]], True)], [(1, 0, 4), (1, 1, 5)], [(1, A)])
    seat = replace(again.admissions[0], seed=1)
    assert broken("seat", engine(), A_PREFILL, replace(again, admissions=(seat,))).uid == A


def test_penalties_need_the_tokens_so_far() -> None:
    params = SamplingParams(max_tokens=5, presence_penalty=1.0)
    requests = {A: Ask(prompt(A), params)}
    for history, fine in ((prompt(A), True), (None, False), (prompt(A)[:-1], False)):
        seat = Admission(0, A, params, 0, prompt_ids=None if history is None else ints(history))
        sim = SimEngine(SPEC, requests)
        sim.launch(replace(A_PREFILL, admissions=(seat,)))
        if fine:
            sim.result()
        else:
            with pytest.raises(SimViolation, match="seat"):
                sim.result()


# ---- owners of slots and pages ---------------------------------------------------------------------------------


def test_a_slot_reused_while_its_token_write_is_pending_is_found() -> None:
    step = make(1, [(0, 0, prompt(B), True)], [(0, 0, 4), (0, 1, 5)], [(0, B)])
    violation = broken("slot-in-flight", engine(), A_PREFILL, step, launch_first=True)
    assert (violation.step, violation.uid, violation.slot) == (1, B, 0)
    run(engine(), A_PREFILL, step)


@pytest.mark.parametrize("page", [0, 1])
def test_a_page_written_while_a_step_in_flight_touches_it_is_found(page: int) -> None:
    step = make(1, [(1, 0, prompt(B), True)], [(1, 0, 5), (1, 1, page)], [(1, B)])
    violation = broken("page-in-flight", engine(), A_PREFILL, step, launch_first=True)
    assert (violation.step, violation.uid, violation.page) == (1, B, page)
    run(engine(), A_PREFILL, step)


def test_two_rows_that_write_one_page_are_found() -> None:
    rows: list[Row] = [(0, 0, prompt(A), True), (1, 0, prompt(C), True)]
    table = [(0, 0, 0), (0, 1, 1), (1, 0, 2), (1, 1, 3), (1, 2, 1)]
    assert broken("page-shared", engine(), make(0, rows, table, [(0, A), (1, C)])).page == 1


def test_one_page_twice_in_a_row_is_found() -> None:
    broken("page-shared", engine(), make(0, [(0, 0, prompt(A), True)], [(0, 0, 1), (0, 1, 1)], [(0, A)]))


def test_a_page_read_in_the_step_that_writes_it_is_found() -> None:
    rows: list[Row] = [(0, 0, prompt(A), True), (1, 4, [60], True)]
    table = [(0, 0, 0), (0, 1, 1), (1, 0, 0), (1, 1, 2)]
    assert broken("page-shared", engine(), make(0, rows, table, [(0, A), (1, B)])).page == 0


def test_a_table_that_names_a_page_given_back_is_found_even_if_its_content_is_right() -> None:
    # B was given A's page 0, and wrote there what stood there before: the same four tokens.
    thief = make(1, [(1, 0, prompt(B), True)], [(1, 0, 0), (1, 1, 2)], [(1, B)])
    victim = make(2, [(0, 6, [PENDING], True)], decode=1)
    violation = broken("page-given-back", engine(), A_PREFILL, thief, victim)
    assert (violation.row, violation.uid, violation.page, violation.position) == (0, A, 0, 0)


def test_a_page_given_back_is_found_in_the_very_step_that_writes_it() -> None:
    rows: list[Row] = [(0, 6, [PENDING], True), (1, 0, prompt(B), True)]
    step = make(1, rows, [(1, 0, 0), (1, 1, 2)], [(1, B)], decode=1)
    violation = broken("page-given-back", engine(), A_PREFILL, step)
    assert (violation.row, violation.uid, violation.page, violation.position) == (0, A, 0, 0)


def test_pointing_at_the_cached_twin_before_the_own_page_is_given_back_is_fine() -> None:
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


def test_a_position_past_the_longest_is_found() -> None:
    long = Ask(list(range(14)), SamplingParams(max_tokens=9))
    sim = SimEngine(SPEC, {A: long})
    table = [(0, i, i) for i in range(4)]
    row: list[Row] = [(0, 0, [*long.prompt, 1, 2, 3], True)]
    seat = Admission(0, A, long.params, 0)
    assert broken("position", sim, replace(make(0, row, table), admissions=(seat,))).uid == A


def test_the_last_token_needs_no_kv() -> None:
    sim = engine()
    run(sim, make(0, [(0, 0, prompt(B), True)], [(0, 0, 0), (0, 1, 1)], [(0, B)]))
    run(sim, *(make(i, [(0, 4 + i, [PENDING], True)], decode=1) for i in (1, 2)))
    broken("position", sim, make(3, [(0, 7, [PENDING], True)], decode=1))


@pytest.mark.parametrize("start", [4, 5, 7])
def test_a_row_that_does_not_go_on_where_the_last_one_ended_is_found(start: int) -> None:
    token = Truth(REQUESTS[A], SPEC.vocab_size)[start]
    step = make(1, [(0, start, [token], True)], decode=1)
    assert broken("start", engine(), A_PREFILL, step).position == start


def test_a_skipped_prefix_is_found() -> None:
    step = make(0, [(0, 4, [5, 6], True)], [(0, 0, 0), (0, 1, 1)], [(0, A)])
    violation = broken("kv-content", engine(), step)
    assert (violation.position, violation.page) == (0, 0)
    assert "never written" in violation.text


def test_another_prefix_is_found_and_named() -> None:
    c = make(1, [(1, 4, prompt(C)[4:], True)], [(1, 0, 0), (1, 1, 4), (1, 2, 5)], [(1, C)])
    violation = broken("kv-content", engine(), A_PREFILL, c)
    assert violation.page == 0
    assert f"the KV of request {A} at position 0" in violation.text


def test_an_input_token_of_another_is_found() -> None:
    step = make(0, [(0, 0, [1, 2, 3, 9, 5, 6], True)], [(0, 0, 0), (0, 1, 1)], [(0, A)])
    violation = broken("input-token", engine(), step)
    assert (violation.position, violation.text) == (3, "input token 9 instead of 4")


def test_a_pending_token_that_the_slot_does_not_hold_is_found() -> None:
    chunk = make(0, [(0, 0, prompt(A)[:4], False)], [(0, 0, 0), (0, 1, 1)], [(0, A)])
    assert (
        "holds no token" in broken("input-token", engine(), chunk, make(1, [(0, 4, [PENDING], False)], decode=1)).text
    )


def test_a_token_that_nobody_sampled_yet_is_found() -> None:
    known = [*prompt(A), answer(A)[0]]
    step = make(0, [(0, 0, known, True)], [(0, 0, 0), (0, 1, 1)], [(0, A)])
    assert broken("input-token", engine(), step).position == 6


def test_sampling_before_the_prompt_ends_is_found() -> None:
    broken("sample", engine(), make(0, [(0, 0, prompt(A)[:4], True)], [(0, 0, 0)], [(0, A)]))


def test_no_sample_at_the_end_of_the_prompt_is_found() -> None:
    broken("sample", engine(), make(0, [(0, 0, prompt(A), False)], [(0, 0, 0), (0, 1, 1)], [(0, A)]))


def test_a_row_after_the_last_token_was_read_is_found_and_one_in_flight_is_not() -> None:
    eos = answer(A)[1]
    third = make(2, [(0, 7, [PENDING], True)], decode=1)
    sim = engine(eos=[eos])
    run(sim, A_PREFILL)
    sim.launch(A_DECODE)
    sim.launch(third)  # the end is not known yet
    sim.result()
    sim.result()
    violation = broken("row-after-end", sim, make(3, [(0, 8, [PENDING], True)], [(0, 2, 2)], decode=1))
    assert (violation.uid, violation.step) == (A, 3)


def test_counts_tell_prompt_output_and_recomputed_positions_apart() -> None:
    sim = engine()
    run(sim, A_PREFILL, A_DECODE)
    counts = SimCounts(steps=2, rows=2, tokens=7, prompt_tokens=6, max_rows=1, max_tokens=6)
    assert sim.counts == replace(counts, seats={A: 1}, computed_by={A: 7})
