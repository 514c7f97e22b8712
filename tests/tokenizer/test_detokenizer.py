"""Incremental detokenization: complete characters, and the same text as decoding at once."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from minisgl.core import Finished, Output, SamplingParams
from minisgl.message import Delta
from minisgl.tokenizer import Detokenizer, Tokenizer

WORDS = "Hello world 🙂👩‍🚀 page don't 前缀 é"


@pytest.fixture(scope="session")
def tokenizer(checkpoint: Path) -> Tokenizer:
    made = Tokenizer.from_dir(checkpoint)
    assert made is not None
    return made


def play(
    tokenizer: Tokenizer | None, prompt: Sequence[int], tokens: Sequence[int], params: SamplingParams, end: Finished
) -> list[Delta]:
    """Return one request's deltas. Like a real caller, abort the request one step after a stop string was found.

    The abort is simulated: the output after the delta with ``matched_stop`` carries ``end``.
    """
    detokenizer, deltas, stopped = Detokenizer(tokenizer), [], False
    detokenizer.add_request(end.uid, prompt, params)
    for i, token in enumerate(tokens):
        final = i == len(tokens) - 1 or stopped
        deltas += detokenizer.feed(Output([end.uid], [token], [end] if final else []))
        if final:
            break
        stopped = deltas[-1].matched_stop is not None if deltas else False
    assert len(detokenizer) == 0
    return deltas


def text_of(deltas: Sequence[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


def test_pieces_join_to_full_text(tokenizer: Tokenizer) -> None:
    random.seed(1)
    words = [tokenizer.encode(word, add_special_tokens=False) for word in (*WORDS, " world", "Hello", "👩‍🚀")]
    for _ in range(300):
        tokens = [token for _ in range(10) for token in random.choice(words)]
        split = random.randint(0, len(tokens) - 1)
        before = tokenizer.decode(tokens[:split])
        if before.endswith("\ufffd"):
            continue
        deltas = play(tokenizer, tokens[:split], tokens[split:], SamplingParams(), Finished(7, "length"))
        assert before + text_of(deltas) == tokenizer.decode(tokens)
        assert [token for delta in deltas for token in delta.tokens] == tokens[split:]


def test_random_tokens_join_to_full_text(tokenizer: Tokenizer) -> None:
    """Random token ids, which are not valid UTF-8, give the same text one by one as decoded all at once."""
    random.seed(2)
    for _ in range(300):
        tokens = [random.randrange(tokenizer.vocab_size) for _ in range(random.randint(1, 30))]
        deltas = play(tokenizer, [], tokens, SamplingParams(), Finished(7, "length"))
        assert [token for delta in deltas for token in delta.tokens] == tokens
        assert text_of(deltas) == tokenizer.decode(tokens)


def test_characters_are_complete(tokenizer: Tokenizer) -> None:
    stream = tokenizer.stream((), SamplingParams())
    ids = tokenizer.encode("x🙂y", add_special_tokens=False)
    pieces = [*(stream.feed(token) for token in ids), stream.flush()]
    assert "".join(pieces).strip() == "x🙂y"
    assert not any("\ufffd" in piece for piece in pieces)


def test_incomplete_character_at_end(tokenizer: Tokenizer) -> None:
    """An output that ends in the middle of a character ends with U+FFFD."""
    ids = tokenizer.encode("x👩", add_special_tokens=False)[:-1]
    deltas = play(tokenizer, [], ids, SamplingParams(), Finished(1, "length"))
    assert text_of(deltas) == tokenizer.decode(ids)
    assert text_of(deltas).endswith("\ufffd")


def test_prompt_ends_within_character(tokenizer: Tokenizer) -> None:
    """If the prompt ends in the middle of a character, the output is decoded without the prompt as context."""
    ids = tokenizer.encode("x👩y", add_special_tokens=False)
    split = len(tokenizer.encode("x👩", add_special_tokens=False)) - 1
    deltas = play(tokenizer, ids[:split], ids[split:], SamplingParams(), Finished(1, "length"))
    assert text_of(deltas) == tokenizer.decode(ids[split:])
    assert "x" not in text_of(deltas)


def test_stop_token_has_no_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("Hello world", add_special_tokens=False)
    end = Finished(1, "stop", 0, 0, len(ids), stop_id=ids[-1])
    deltas = play(tokenizer, [], ids, SamplingParams(stop_token_ids=(ids[-1],)), end)
    assert text_of(deltas) == tokenizer.decode(ids[:-1])
    assert [token for delta in deltas for token in delta.tokens] == ids


def test_special_tokens_are_skipped_or_shown(tokenizer: Tokenizer) -> None:
    eos = tokenizer.raw.token_to_id("<|eos|>")
    ids = [
        *tokenizer.encode("Hello", add_special_tokens=False),
        eos,
        *tokenizer.encode("Hello", add_special_tokens=False),
    ]
    for skip in (True, False):
        params = SamplingParams(skip_special_tokens=skip)
        deltas = play(tokenizer, [], ids, params, Finished(1, "length", 0, 0, len(ids)))
        assert text_of(deltas) == tokenizer.decode(ids, skip)
        assert ("<|eos|>" in text_of(deltas)) is not skip


def test_promise_1_one_finish_per_request(tokenizer: Tokenizer) -> None:
    """Each request gets one delta with ``finish``, and no delta after it, whatever outputs still arrive."""
    detokenizer = Detokenizer(tokenizer)
    token = tokenizer.encode("Hello", add_special_tokens=False)[-1]
    for uid in (1, 2):
        detokenizer.add_request(uid, [], SamplingParams())
    assert [delta.uid for delta in detokenizer.feed(Output([1, 2, 3], [token, token, token]))] == [1, 2]
    ends = detokenizer.feed(Output([], [], [Finished(1, "abort"), Finished(2, "error", error="the engine died")]))
    assert [(delta.uid, delta.finish and delta.finish.finish_reason) for delta in ends] == [(1, "abort"), (2, "error")]
    assert detokenizer.feed(Output([1], [token], [Finished(1, "length")])) == []
    assert len(detokenizer) == 0


def test_no_tokenizer_passes_tokens() -> None:
    deltas = play(None, [5], [1, 2, 3], SamplingParams(stop=("a",)), Finished(1, "length", 1, 0, 3))
    assert [(delta.tokens, delta.text) for delta in deltas] == [([1], ""), ([2], ""), ([3], "")]
