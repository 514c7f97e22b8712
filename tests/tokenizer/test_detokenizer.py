"""Tokens to text as they come: whole characters, the same text as all at once, stop strings cut."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from minisgl.core import Finished, Output, SamplingParams
from minisgl.message import Delta
from minisgl.tokenizer import Detokenizer, Tokenizer
from minisgl.tokenizer.detokenizer import TextStream

WORDS = "Hello world 🙂👩‍🚀 page don't 前缀 é"


@pytest.fixture(scope="session")
def tokenizer(checkpoint: Path) -> Tokenizer:
    made = Tokenizer.from_dir(checkpoint)
    assert made is not None
    return made


def play(
    tokenizer: Tokenizer | None, prompt: Sequence[int], tokens: Sequence[int], params: SamplingParams, end: Finished
) -> list[Delta]:
    """One request's deltas, as a driver gets them that aborts where it should."""
    detokenizer, deltas, stopped = Detokenizer(tokenizer), [], False
    detokenizer.open(end.uid, prompt, params)
    for i, token in enumerate(tokens):
        final = i == len(tokens) - 1 or stopped
        deltas += detokenizer.feed(Output([end.uid], [token], [end] if final else []))
        if final:
            break
        stopped = deltas[-1].stopped is not None if deltas else False
    assert len(detokenizer) == 0
    return deltas


def text_of(deltas: Sequence[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


def test_pieces_make_the_text_of_all_tokens(tokenizer: Tokenizer) -> None:
    random.seed(1)
    words = [tokenizer.encode(word, special=False) for word in (*WORDS, " world", "Hello", "👩‍🚀")]
    for _ in range(300):
        tokens = [token for _ in range(10) for token in random.choice(words)]
        split = random.randint(0, len(tokens) - 1)
        before = tokenizer.decode(tokens[:split])
        if before.endswith("\ufffd"):
            continue
        deltas = play(tokenizer, tokens[:split], tokens[split:], SamplingParams(), Finished(7, "length"))
        assert before + text_of(deltas) == tokenizer.decode(tokens)
        assert [token for delta in deltas for token in delta.tokens] == tokens[split:]


def test_pieces_of_nonsense_too(tokenizer: Tokenizer) -> None:
    """A model with random weights writes bytes that are no characters. (With byte fallback tokens the library turns a
    whole run of bytes to U+FFFD once one of them is wrong, also those that were shown before.)"""
    random.seed(2)
    fallback = tokenizer.raw.token_to_id("<0x41>") is not None
    for _ in range(300):
        tokens = [random.randrange(tokenizer.vocab_size) for _ in range(random.randint(1, 30))]
        deltas = play(tokenizer, [], tokens, SamplingParams(), Finished(7, "length"))
        if fallback:
            assert [token for delta in deltas for token in delta.tokens] == tokens
        else:
            assert text_of(deltas) == tokenizer.decode(tokens)


def test_a_character_comes_whole(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer)
    ids = tokenizer.encode("x🙂y", special=False)
    pieces = [stream.feed(token) for token in ids]
    assert "".join(pieces).strip() == "x🙂y"
    assert not any("\ufffd" in piece for piece in pieces)


def test_half_a_character_at_the_end_is_shown_as_such(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("x👩", special=False)[:-1]
    deltas = play(tokenizer, [], ids, SamplingParams(), Finished(1, "length"))
    assert text_of(deltas).strip("\ufffd") == "x"
    assert text_of(deltas).endswith("\ufffd")


def test_a_prompt_that_ends_within_a_character(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("x👩y", special=False)
    split = len(tokenizer.encode("x👩", special=False)) - 1
    deltas = play(tokenizer, ids[:split], ids[split:], SamplingParams(), Finished(1, "length"))
    assert text_of(deltas) == tokenizer.decode(ids[split:])
    assert "x" not in text_of(deltas)


@pytest.mark.parametrize("stop", ["wor", "d 🙂👩", "🙂", "\u200d🚀 p", "don't 前", "o world"])
def test_promise_6_a_stop_string_is_cut_across_token_borders(tokenizer: Tokenizer, stop: str) -> None:
    ids = tokenizer.encode(WORDS, special=False)
    prompt = tokenizer.encode("Hello", special=False)
    params = SamplingParams(stop=("never there", stop))
    deltas = play(tokenizer, prompt, ids, params, Finished(3, "abort", 5, 4, 99))
    whole = tokenizer.decode([*prompt, *ids])[len(tokenizer.decode(prompt)) :]
    assert stop in whole
    assert text_of(deltas) == whole[: whole.index(stop)]
    assert [delta.stopped for delta in deltas if delta.stopped] == [stop]
    end = deltas[-1].finish
    assert end is not None
    assert (end.finish_reason, end.prompt_tokens, end.cached_tokens) == ("stop", 5, 4)
    assert end.output_tokens == len([token for delta in deltas for token in delta.tokens])
    counted = ids[: end.output_tokens]
    assert stop in tokenizer.decode([*prompt, *counted])
    before = tokenizer.decode([*prompt, *counted[:-1]])  # the last token was needed to see it whole
    assert stop not in before or before.endswith("\ufffd")


def test_a_stop_string_that_only_began_is_shown_in_the_end(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("Hello world", special=False)
    deltas = play(tokenizer, [], ids, SamplingParams(stop=("world!",)), Finished(1, "length", 0, 0, len(ids)))
    assert text_of(deltas) == "Hello world"
    assert "world" not in text_of(deltas[:-1])
    assert deltas[-1].finish is not None
    assert deltas[-1].finish.finish_reason == "length"


def test_the_token_that_ended_a_request_has_no_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("Hello world", special=False)
    end = Finished(1, "stop", 0, 0, len(ids), stop_id=ids[-1])
    deltas = play(tokenizer, [], ids, SamplingParams(stop_token_ids=(ids[-1],)), end)
    assert text_of(deltas) == tokenizer.decode(ids[:-1])
    assert [token for delta in deltas for token in delta.tokens] == ids


def test_special_tokens_are_skipped_or_shown(tokenizer: Tokenizer) -> None:
    eos = tokenizer.raw.token_to_id("<|eos|>")
    ids = [*tokenizer.encode("Hello", special=False), eos, *tokenizer.encode("Hello", special=False)]
    for skip in (True, False):
        params = SamplingParams(skip_special_tokens=skip)
        deltas = play(tokenizer, [], ids, params, Finished(1, "length", 0, 0, len(ids)))
        assert text_of(deltas) == tokenizer.decode(ids, skip)
        assert ("<|eos|>" in text_of(deltas)) is not skip


def test_promise_1_exactly_one_end_and_nothing_after_it(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer)
    token = tokenizer.encode("Hello", special=False)[-1]
    for uid in (1, 2):
        detokenizer.open(uid, [], SamplingParams(stop=("o",)))
    first = detokenizer.feed(Output([1, 2, 3], [token, token, token]))
    assert [delta.uid for delta in first] == [1, 2]
    assert all(delta.finish is None for delta in first)
    assert all((delta.text, delta.stopped) == (first[0].text, "o") for delta in first)
    assert detokenizer.feed(Output([1], [token])) == []  # computed before the abort got there
    second = detokenizer.feed(Output([], [], [Finished(1, "abort"), Finished(2, "error", error="the engine died")]))
    assert [(delta.uid, delta.finish and delta.finish.finish_reason) for delta in second] == [(1, "stop"), (2, "stop")]
    assert detokenizer.feed(Output([1], [token], [Finished(1, "length")])) == []
    assert len(detokenizer) == 0


def test_without_a_tokenizer_tokens_pass_through() -> None:
    deltas = play(None, [5], [1, 2, 3], SamplingParams(stop=("a",)), Finished(1, "length", 1, 0, 3))
    assert [(delta.tokens, delta.text) for delta in deltas] == [([1], ""), ([2], ""), ([3], "")]


def test_logprobs_carry_each_tokens_own_bytes(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("🙂", special=False)
    detokenizer = Detokenizer(tokenizer)
    detokenizer.open(1, [], SamplingParams(logprobs=1))
    raw = b""
    for token in ids:
        (delta,) = detokenizer.feed(Output([1], [token], logprobs={0: (-0.25, (token, ids[0]), (-0.25, -1.5))}))
        (logprob,) = delta.logprobs
        assert (logprob.logprob, [top.logprob for top in logprob.top]) == (-0.25, [-0.25, -1.5])
        assert logprob.text == logprob.raw.decode(errors="replace")
        raw += logprob.raw
    assert raw.strip() == "🙂".encode()
