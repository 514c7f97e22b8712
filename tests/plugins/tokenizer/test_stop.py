"""`StopFinder` reports the stop string that is complete first, independently of how the text is cut into pieces."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minisgl.core import InvalidRequestError, SamplingParams
from minisgl.plugins.tokenizer.stops.finder import StopFinder, _borders


def cut(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Find the stop string by its definition, with a search over all prefixes of the text.

    Return the text before the stop string, and the stop string or None. The stop string is the longest of those that
    end the shortest prefix of the text that ends with any stop string.
    """
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


def run(pieces: list[str], stops: list[str]) -> tuple[str, str | None]:
    finder, shown = StopFinder(stops), ""
    for piece in pieces:
        safe, found = finder.feed(piece)
        shown += safe
        if found is not None:
            return shown, found
    return shown + finder.flush(), None


letters = st.text("ab🙂", max_size=12)


@given(st.lists(letters, max_size=8), st.lists(st.text("ab🙂", min_size=1, max_size=6), min_size=1, max_size=4))
def test_independent_of_pieces(pieces: list[str], stops: list[str]) -> None:
    assert run(pieces, stops) == cut("".join(pieces), stops)


@given(letters, st.lists(st.text("ab🙂", min_size=1, max_size=6), min_size=1, max_size=4))
def test_holds_back_minimum(text: str, stops: list[str]) -> None:
    """The finder holds back exactly the longest end of the text that is the beginning of a stop string."""
    if cut(text, stops)[1] is not None:
        return
    finder = StopFinder(stops)
    shown = "".join(finder.feed(character)[0] for character in text)
    held = text[len(shown) :]
    longest = max((n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n])), default=0)
    assert held == text[len(text) - longest :]


@pytest.mark.parametrize(
    ("stops", "text", "shown", "found"),
    [
        (["abc", "b"], "xabc", "xa", "b"),
        (["ab", "b"], "xab", "x", "ab"),
        (["aab"], "aaab", "a", "aab"),
        (["\n\n"], "one\ntwo\n\nthree", "one\ntwo", "\n\n"),
        (["é🙂"], "caf\u00e9\U0001f642!", "caf", "é🙂"),
    ],
)
def test_examples(stops: list[str], text: str, shown: str, found: str) -> None:
    assert run([text], stops) == (shown, found)
    assert run(list(text), stops) == (shown, found)


def test_cost_independent_of_stop_length() -> None:
    """A character of the text costs about the same with a stop string of 10 characters and with one of 10 000."""

    def seconds(length: int) -> float:
        finder, text = StopFinder(["a" * length + "b"]), ["a" * 50] * 400
        start = time.thread_time()
        for piece in text:
            finder.feed(piece)
        return time.thread_time() - start

    random.seed(0)
    short = min(seconds(10) for _ in range(3))
    long = min(seconds(10_000) for _ in range(3))
    assert long < 10 * short


def test_borders_once_per_stop_string() -> None:
    """The finders of a request's ``n`` choices share the borders of its stop strings."""
    stops = [f"a shared stop string {i}" for i in range(SamplingParams.MAX_STOPS)]
    before = _borders.cache_info().misses
    for _ in range(128):
        StopFinder(stops)
    assert _borders.cache_info().misses - before == len(stops)


def test_length_of_a_stop_string_is_bounded() -> None:
    longest = "x" * SamplingParams.MAX_STOP_CHARS
    SamplingParams(stop=("a", longest)).check()
    with pytest.raises(InvalidRequestError, match="at most 1024 characters") as error:
        SamplingParams(stop=("a", longest + "x")).check()
    assert error.value.field == "stop"
    assert len(error.value.message) < 200
