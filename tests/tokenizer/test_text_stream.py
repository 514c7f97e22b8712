"""Text streams: the same text as decoding at once, and never more held back than what can still become a character."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.core import SamplingParams
from minisgl.models.resolve import resolve_model
from minisgl.tokenizer import Tokenizer

from .conftest import KINDS, byte_level, sentencepiece_like

CHARACTERS = "aé前🙂\u200d\ufffd\U0010ffff"
# Bytes at every border of UTF-8: ASCII, continuation bytes, first bytes of 2, 3 and 4, and bytes that are never valid.
BORDERS = bytes.fromhex("20 41 7f 80 8f 90 9f a0 bf c0 c2 df e0 e5 ed ef f0 f4 f5 ff")


def with_odd_tokens(kind: type[Tokenizer], raw: tokenizers.Tokenizer) -> Tokenizer:
    raw.add_tokens(["é x", "aéb", "\ufffd"])
    raw.add_special_tokens(["<|é|>"])
    return kind(raw)


def tutor(kind: type[Tokenizer]) -> Tokenizer:
    made = kind.read(resolve_model("tutor"))
    assert made is not None
    return made


BYTE_LEVEL = {f"trained here, {kind.__name__}": with_odd_tokens(kind, byte_level()) for kind in KINDS}
BYTE_LEVEL |= {f"tutor, {kind.__name__}": tutor(kind) for kind in KINDS}


def stream_of(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Return token ids of every kind, many of them bytes at the borders of UTF-8, in and out of order."""
    single = {data[0]: i for i in range(tokenizer.vocab_size) if len(data := tokenizer.token_bytes(i)) == 1}
    if fallback := getattr(tokenizer, "fallback_bytes", None):
        single = {byte: token for token, byte in fallback.items()}
    borders = st.sampled_from([single[byte] for byte in BORDERS if byte in single])
    whole = st.sampled_from(CHARACTERS).map(lambda c: [single[byte] for byte in c.encode() if byte in single])
    any_token = st.integers(0, tokenizer.vocab_size + 3)
    parts = st.one_of(whole, st.lists(borders, max_size=5), st.lists(any_token, max_size=3))
    return st.lists(parts, max_size=12).map(lambda lists: [token for part in lists for token in part])


def texts_of(tokenizer: Tokenizer, tokens: Sequence[int], skip: bool = True, tail: Sequence[int] = ()) -> list[str]:
    stream = tokenizer.stream(tail, SamplingParams(skip_special_tokens=skip))
    return [*(stream.feed(token) for token in tokens), stream.flush()]


@pytest.mark.parametrize("name", BYTE_LEVEL)
@pytest.mark.parametrize("skip", [True, False])
def test_byte_level_pieces_are_the_whole_text(name: str, skip: bool) -> None:
    """After every token, the text so far is that of `decode`, up to bytes that can still become a character."""
    tokenizer = BYTE_LEVEL[name]

    @settings(deadline=None)
    @given(stream_of(tokenizer))
    def check(tokens: list[int]) -> None:
        pieces = texts_of(tokenizer, tokens, skip)
        assert "".join(pieces) == tokenizer.decode(tokens, skip)
        data = b""
        for i, token in enumerate(tokens):
            data += tokenizer.decoded_bytes(token, skip)
            held = unfinished(data)
            assert "".join(pieces[: i + 1]) == data[: len(data) - len(held)].decode(errors="replace")

    check()


def unfinished(data: bytes) -> bytes:
    """Return the bytes at the end of ``data`` that more bytes can make a character."""
    for length in (3, 2, 1):
        end = data[len(data) - length :]
        for rest in itertools.product((0x80, 0x90, 0xA0), *[(0x80,)] * 2):  # a first byte may restrict the second
            for missing in (1, 2, 3):
                with contextlib.suppress(UnicodeDecodeError):
                    if end and len((end + bytes(rest[:missing])).decode()) == 1:
                        return end
    return b""


def test_other_pieces_are_the_whole_text() -> None:
    """For another decoder, the text comes at the end, and keeps the space of its first token after a prompt."""
    tokenizer = Tokenizer(sentencepiece_like())
    tokens, before = tokenizer.encode("world page \xe9", add_special_tokens=False), tokenizer.encode("Hello")
    assert texts_of(tokenizer, tokens) == [""] * len(tokens) + [tokenizer.decode(tokens)]
    assert "".join(texts_of(tokenizer, tokens, tail=before)) == " world page \xe9"


@pytest.mark.parametrize("tokenizer", BYTE_LEVEL.values())
def test_a_stream_of_fragments_does_not_pause(tokenizer: Tokenizer) -> None:
    """A model with random weights samples continuation bytes without end: each of them is text at once."""
    fragment = next(i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == b"\x80")
    pieces = texts_of(tokenizer, [fragment] * 2000)
    assert pieces == ["\ufffd"] * 2000 + [""]
    first = next(i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == b"\xf0")
    pieces = texts_of(tokenizer, [first] * 2000)
    assert "".join(pieces) == tokenizer.decode([first] * 2000)
    assert "" not in pieces[1:-1]


def test_a_token_with_unmapped_characters() -> None:
    """As the library does, a byte-level token with a character that represents no byte is its UTF-8."""
    tokenizer = BYTE_LEVEL["trained here, Tokenizer"]
    raw = tokenizer.raw
    for content in ("é x", "aéb", "<|é|>"):
        token = raw.token_to_id(content)
        assert "".join(texts_of(tokenizer, [token], False)) == raw.decode([token], False)
