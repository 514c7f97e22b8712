"""Text streams of tokenizers with byte tokens: the same text as decoding at once, and little of it held back."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.core import SamplingParams
from minisgl.plugins.tokenizer.exact.tokenizer import ExactTokenizer

from ...tokenizer import test_text_stream
from ...tokenizer.conftest import sentencepiece_like
from ...tokenizer.test_text_stream import stream_of, texts_of, unfinished

FALLBACK = ExactTokenizer(sentencepiece_like())


@settings(deadline=None)
@given(stream_of(FALLBACK), st.booleans())
def test_byte_fallback_pieces_are_the_whole_text(tokens: list[int], skip: bool) -> None:
    """Text is held back only within a run of byte tokens that is valid so far."""
    pieces = texts_of(FALLBACK, tokens, skip)
    assert "".join(pieces) == FALLBACK.decode(tokens, skip)
    run = b""
    for i, token in enumerate(tokens):
        if not FALLBACK.is_dropped(token, skip):
            byte = FALLBACK.fallback_bytes.get(token)
            run = b"" if byte is None else run + bytes([byte])
        valid = run[: len(run) - len(unfinished(run))]
        if not run or valid.decode(errors="ignore").encode() != valid:
            assert "".join(pieces[: i + 1]) == FALLBACK.decode(tokens[: i + 1], skip)


@settings(deadline=None)
@given(stream_of(FALLBACK))
def test_byte_fallback_after_a_prompt(tokens: list[int]) -> None:
    """The output after a prompt keeps the space of its first token."""
    before = FALLBACK.encode("Hello")
    want = FALLBACK.decode([*before, *tokens])[len(FALLBACK.decode(before)) :]
    assert "".join(texts_of(FALLBACK, tokens, tail=before)) == want


def test_pending_text_of_a_run() -> None:
    """The characters of a run of byte tokens are pending while they are complete."""
    single = {byte: token for token, byte in FALLBACK.fallback_bytes.items()}
    stream = FALLBACK.stream((), SamplingParams())
    found = []
    for byte in "aé🙂".encode():
        assert stream.feed(single[byte]) == ""
        found.append(stream.pending)
    assert found == ["a", "", "aé", "", "", "", "aé🙂"]
    assert (stream.flush(), stream.pending) == ("aé🙂", "")


def test_a_stream_of_fragments_does_not_pause() -> None:
    test_text_stream.test_a_stream_of_fragments_does_not_pause(FALLBACK)
