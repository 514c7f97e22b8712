"""The text of a request is cut at a stop string, wherever it begins in a token and ends in another."""

from __future__ import annotations

import pytest

from minisgl.core import Finished, InvalidRequestError, Output, SamplingParams
from minisgl.plugins.tokenizer.stops import request
from minisgl.tokenizer import Detokenizer, Tokenizer
from minisgl.tokenizer.detokenizer import check_stops

from ...tokenizer import conftest, test_detokenizer
from ...tokenizer.test_detokenizer import WORDS, play, text_of

checkpoint, tokenizer = conftest.checkpoint, test_detokenizer.tokenizer


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
            check_stops(SamplingParams(stop=("x", stop)), tokenizer)
        assert error.value.field == "stop"
        check_stops(SamplingParams(stop=(stop,), skip_special_tokens=False), tokenizer)
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


def test_promise_1_one_finish_at_a_stop_string(tokenizer: Tokenizer) -> None:
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


def test_without_the_plugin_stop_strings_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minisgl.tokenizer.detokenizer.STOPS", f"{request.__name__}_deleted")
    check_stops(SamplingParams(), None)
    with pytest.raises(InvalidRequestError, match="plugins/tokenizer/stops, which is missing") as error:
        check_stops(SamplingParams(stop=("x",)), None)
    assert error.value.field == "stop"
