"""Incremental detokenization: complete characters, the same text as decoding at once, text cut at stop strings."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from minisgl.core import Finished, InvalidRequestError, Output, SamplingParams
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


@pytest.mark.parametrize("stop", ["wor", "d 🙂👩", "🙂", "\u200d🚀 p", "don't 前", "o world"])
def test_stop_string_across_tokens(tokenizer: Tokenizer, stop: str) -> None:
    """The text ends before the stop string, also where the stop string spans several tokens."""
    ids = tokenizer.encode(WORDS, add_special_tokens=False)
    prompt = tokenizer.encode("Hello", add_special_tokens=False)
    params = SamplingParams(stop=("never there", stop))
    deltas = play(tokenizer, prompt, ids, params, Finished(3, "abort", 5, 4, 99))
    full_text = tokenizer.decode([*prompt, *ids])[len(tokenizer.decode(prompt)) :]
    assert stop in full_text
    assert text_of(deltas) == full_text[: full_text.index(stop)]
    assert [delta.matched_stop for delta in deltas if delta.matched_stop] == [stop]
    end = deltas[-1].finish
    assert end is not None
    assert (end.finish_reason, end.prompt_tokens, end.cached_tokens) == ("stop", 5, 4)
    assert end.output_tokens == len([token for delta in deltas for token in delta.tokens])
    counted = ids[: end.output_tokens]
    assert stop in tokenizer.decode([*prompt, *counted])
    before = tokenizer.decode([*prompt, *counted[:-1]])  # without the last token the stop string is not complete
    assert stop not in before or before.endswith("\ufffd")


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("stops", [("<|eos|>",), ("never", "<|eos|>"), ("<|eos|>", "Hello world!")])
def test_a_special_token_as_stop_string(tokenizer: Tokenizer, stops: tuple[str, ...], skip: bool) -> None:
    """The token ends the request. The beginning of another stop string before it is text."""
    ids = [*tokenizer.encode("Hello world", add_special_tokens=False), tokenizer.raw.token_to_id("<|eos|>")]
    params = SamplingParams(stop=stops, skip_special_tokens=skip)
    detokenizer = Detokenizer(tokenizer)
    detokenizer.add_request(1, [], params)
    (delta,) = detokenizer.feed(Output([1] * (2 * len(ids)), [*ids, *ids]))
    assert (delta.text, delta.matched_stop, delta.tokens) == ("Hello world", "<|eos|>", ids)
    (last,) = detokenizer.feed(Output(finished=[Finished(1, "abort", output_tokens=99)]))
    assert last.finish is not None
    assert (last.finish.finish_reason, last.finish.output_tokens, last.text) == ("stop", len(ids), "")


def test_a_special_token_within_a_stop_string(tokenizer: Tokenizer) -> None:
    """Where special tokens are no text, such a stop string is refused. Elsewhere it is found."""
    for stop in ("<|eos|>\n", "a<|eos|>", "<|eos|><|bos|>"):
        with pytest.raises(InvalidRequestError, match="skip_special_tokens to false") as error:
            tokenizer.stop_tokens(("x", stop))
        assert error.value.field == "stop"
        assert tokenizer.stop_tokens((stop,), skip_special_tokens=False) == {}
    ids = [*tokenizer.encode("Hello", add_special_tokens=False), tokenizer.raw.token_to_id("<|eos|>"), 3]
    params = SamplingParams(stop=("lo<|eos|>",), skip_special_tokens=False)
    deltas = play(tokenizer, [], ids, params, Finished(1, "abort"))
    assert text_of(deltas) == "Hel"


def test_incomplete_stop_string_is_flushed(tokenizer: Tokenizer) -> None:
    """Text that was held back as the beginning of a stop string is released when the request ends without it."""
    ids = tokenizer.encode("Hello world", add_special_tokens=False)
    deltas = play(tokenizer, [], ids, SamplingParams(stop=("world!",)), Finished(1, "length", 0, 0, len(ids)))
    assert text_of(deltas) == "Hello world"
    assert "world" not in text_of(deltas[:-1])
    assert deltas[-1].finish is not None
    assert deltas[-1].finish.finish_reason == "length"


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
        detokenizer.add_request(uid, [], SamplingParams(stop=("o",)))
    first = detokenizer.feed(Output([1, 2, 3], [token, token, token]))
    assert [delta.uid for delta in first] == [1, 2]
    assert all(delta.finish is None for delta in first)
    assert all((delta.text, delta.matched_stop) == (first[0].text, "o") for delta in first)
    assert detokenizer.feed(Output([1], [token])) == []  # a token computed before the scheduler got the abort
    second = detokenizer.feed(Output([], [], [Finished(1, "abort"), Finished(2, "error", error="the engine died")]))
    assert [(delta.uid, delta.finish and delta.finish.finish_reason) for delta in second] == [(1, "stop"), (2, "stop")]
    assert detokenizer.feed(Output([1], [token], [Finished(1, "length")])) == []
    assert len(detokenizer) == 0


def test_no_tokenizer_passes_tokens() -> None:
    deltas = play(None, [5], [1, 2, 3], SamplingParams(stop=("a",)), Finished(1, "length", 1, 0, 3))
    assert [(delta.tokens, delta.text) for delta in deltas] == [([1], ""), ([2], ""), ([3], "")]
