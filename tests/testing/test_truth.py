"""The expected answers: a function of the request alone, with prefix hashes that tell prefixes apart."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.core import SamplingParams
from minisgl.testing.truth import Ask, Truth, expected_output, prefix_hashes

TOKENS = st.lists(st.integers(0, 5), min_size=1, max_size=30)


@settings(deadline=None)
@given(TOKENS, TOKENS)
def test_two_prefixes_have_one_hash_only_if_they_are_equal(a: list[int], b: list[int]) -> None:
    for i, x in enumerate(prefix_hashes(a)):
        for j, y in enumerate(prefix_hashes(b)):
            assert (x == y) == (a[:i] == b[:j])


@settings(deadline=None)
@given(TOKENS, st.integers(1, 30))
def test_tokens_grown_one_by_one_hash_as_a_whole_prompt_does(prompt: list[int], more: int) -> None:
    truth = Truth(Ask(prompt, SamplingParams(max_tokens=more)), vocab_size=50)
    for length in range(len(prompt), len(prompt) + more + 1):
        truth.extend(length)
    np.testing.assert_array_equal(truth.hashes[: truth.known + 1], prefix_hashes(truth.tokens[: truth.known]))


@settings(deadline=None)
@given(TOKENS, st.integers(1, 10), st.integers(1, 10))
def test_an_answer_goes_on_where_a_shorter_one_stopped(prompt: list[int], first: int, more: int) -> None:
    whole = expected_output(Ask(prompt, SamplingParams(max_tokens=first + more)), 50)
    head = expected_output(Ask(prompt, SamplingParams(max_tokens=first)), 50)
    tail = expected_output(Ask([*prompt, *head.tokens], SamplingParams(max_tokens=more)), 50)
    assert whole.tokens == head.tokens + tail.tokens
    assert (whole.reason, whole.stop_id) == ("length", None)


def test_stop_ids_end_an_answer_and_ignore_eos_ignores_only_eos() -> None:
    prompt = [1, 2, 3]
    free = expected_output(Ask(prompt, SamplingParams(max_tokens=8)), 1000)
    eos, stop = free.tokens[2], free.tokens[4]
    assert expected_output(Ask(prompt, SamplingParams(max_tokens=8)), 1000, {eos}) == (free.tokens[:3], "stop", eos)
    params = SamplingParams(max_tokens=8, ignore_eos=True, stop_token_ids=(stop,))
    assert expected_output(Ask(prompt, params), 1000, {eos}) == (free.tokens[:5], "stop", stop)
    last = SamplingParams(max_tokens=3)
    assert expected_output(Ask(prompt, last), 1000, {eos}).reason == "stop"


def test_a_seed_changes_sampled_answers_and_not_greedy_ones() -> None:
    def answer(**params: float) -> list[int]:
        return expected_output(Ask([5, 6], SamplingParams(max_tokens=12, **params)), 1000).tokens  # type: ignore[arg-type]

    assert answer(seed=1) != answer(seed=2)
    assert answer(seed=-1) == answer(seed=-1)
    assert answer(seed=1, temperature=0) == answer(seed=2, temperature=0) == answer(temperature=0)
