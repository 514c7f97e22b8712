"""Tests of expected outputs and prefix hashes."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.core import SamplingParams
from minisgl.testing.truth import ExpectedTokens, SimRequest, expected_output, prefix_hashes

TOKENS = st.lists(st.integers(0, 5), min_size=1, max_size=30)


@settings(deadline=None)
@given(TOKENS, TOKENS)
def test_equal_hashes(a: list[int], b: list[int]) -> None:
    """Two prefixes have equal hashes exactly if they are equal."""
    for i, x in enumerate(prefix_hashes(a)):
        for j, y in enumerate(prefix_hashes(b)):
            assert (x == y) == (a[:i] == b[:j])


@settings(deadline=None)
@given(TOKENS, st.integers(1, 30))
def test_incremental_hashes(prompt: list[int], more: int) -> None:
    """Hashes of tokens that are appended one by one equal the hashes of the complete sequence."""
    expected = ExpectedTokens(SimRequest(prompt, SamplingParams(max_tokens=more)), vocab_size=50)
    for length in range(len(prompt), len(prompt) + more + 1):
        expected.extend(length)
    known = expected.num_known
    np.testing.assert_array_equal(expected.hashes[: known + 1], prefix_hashes(expected.tokens[:known]))


@settings(deadline=None)
@given(TOKENS, st.integers(1, 10), st.integers(1, 10))
def test_continued_output(prompt: list[int], first: int, more: int) -> None:
    """An output is the output with a smaller ``max_tokens``, followed by the output of a prompt that contains it."""
    whole = expected_output(SimRequest(prompt, SamplingParams(max_tokens=first + more)), 50)
    head = expected_output(SimRequest(prompt, SamplingParams(max_tokens=first)), 50)
    tail = expected_output(SimRequest([*prompt, *head.tokens], SamplingParams(max_tokens=more)), 50)
    assert whole.tokens == head.tokens + tail.tokens
    assert (whole.reason, whole.stop_id) == ("length", None)


def test_stop_ids() -> None:
    """Stop ids and eos ids end an output. ``ignore_eos`` ignores only the eos ids."""
    prompt = [1, 2, 3]
    free = expected_output(SimRequest(prompt, SamplingParams(max_tokens=8)), 1000)
    eos, stop = free.tokens[2], free.tokens[4]
    assert expected_output(SimRequest(prompt, SamplingParams(max_tokens=8)), 1000, {eos}) == (
        free.tokens[:3],
        "stop",
        eos,
    )
    params = SamplingParams(max_tokens=8, ignore_eos=True, stop_token_ids=(stop,))
    assert expected_output(SimRequest(prompt, params), 1000, {eos}) == (free.tokens[:5], "stop", stop)
    last = SamplingParams(max_tokens=3)
    assert expected_output(SimRequest(prompt, last), 1000, {eos}).reason == "stop"


def test_seed() -> None:
    """A seed changes the output of a request that samples, and not the output of a greedy request."""

    def answer(**params: float) -> list[int]:
        return expected_output(SimRequest([5, 6], SamplingParams(max_tokens=12, **params)), 1000).tokens  # type: ignore[arg-type]

    assert answer(seed=1) != answer(seed=2)
    assert answer(seed=-1) == answer(seed=-1)
    assert answer(seed=1, temperature=0) == answer(seed=2, temperature=0) == answer(temperature=0)
