"""Text streams: the output tokens of one request become text, token by token.

A stream holds back the bytes at the end of the text that can still become a character: at most three, because a
character has at most four bytes in UTF-8. So the text of at most three tokens is held back. Bytes that can no longer
become a character are returned at once, as U+FFFD. This module knows the tokenizer, but neither requests nor stop
strings.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from minisgl.tokenizer.tokenizer import Tokenizer

MAX_HELD_TOKENS = 3
"""The largest number of tokens whose text a stream holds back."""


class TextStream(Protocol):
    """An incremental decoder for the output tokens of one request."""

    def feed(self, token: int) -> str:
        """Return the text that this token completes: often the token's own text, sometimes an empty text."""

    def flush(self) -> str:
        """Return the text of the bytes that did not become a character. Call this after the last token."""


def text_stream(tokenizer: Tokenizer, tail: Sequence[int] = (), skip_special_tokens: bool = True) -> TextStream:
    """Return a stream for the output after a prompt whose last tokens are ``tail``.

    If the prompt ends in the middle of a character, the output is decoded without the prompt. The pieces together are
    the text of `Tokenizer.decode` for all tokens at once, with one difference for tokenizers with byte fallback: see
    `_ByteFallbackStream`.
    """
    if tokenizer.byte_level:
        return _ByteLevelStream(tokenizer, skip_special_tokens)
    if tokenizer.byte_fallback:
        return _ByteFallbackStream(tokenizer, tail, skip_special_tokens)
    return _DecodingStream(tokenizer, tail, skip_special_tokens)


class _ByteLevelStream:
    """A stream for byte-level tokenizers, as of GPT-2 and Qwen: the text is the UTF-8 decoding of the tokens' bytes.

    A token's text does not depend on the tokens before it, so the prompt is not needed.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool):
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._held = b""  # the beginning of a character: at most three bytes

    def feed(self, token: int) -> str:
        data = self._held + self._tokenizer.decoded_bytes(token, self._skip)
        text, self._held = _decode_complete(data)
        return text

    def flush(self) -> str:
        held, self._held = self._held, b""
        return held.decode(errors="replace")


class _ByteFallbackStream:
    """A stream for tokenizers with byte fallback, as of Llama 2: bytes without a token of their own are byte tokens.

    The library decodes a run of byte tokens to one U+FFFD per byte if the run is not valid UTF-8 as a whole. This
    stream has returned the characters at the beginning of the run by then. So the run's text is: its characters up to
    the first invalid byte, and then one U+FFFD per byte.
    """

    def __init__(self, tokenizer: Tokenizer, tail: Sequence[int], skip_special_tokens: bool):
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._context = _complete_suffix(tokenizer, tail, skip_special_tokens)  # the tokens of the last piece
        self._prefix = tokenizer.decode(self._context, skip_special_tokens)  # their text
        self._held: list[int] = []  # byte tokens: the beginning of a character
        self._invalid = False  # whether the current run of byte tokens is invalid

    def feed(self, token: int) -> str:
        if not self._tokenizer.decoded_bytes(token, self._skip):
            return ""
        if token not in self._tokenizer.fallback_bytes:
            replaced = self.flush()
            self._invalid = False
            return replaced + self._decode([token])
        self._held.append(token)
        if self._invalid:
            return self.flush()
        data = bytes([self._tokenizer.fallback_bytes[held] for held in self._held])
        text, rest = _decode_complete(data)
        if "\ufffd" in text and data != "\ufffd".encode():
            self._invalid = True
            return self.flush()
        if rest:
            return ""
        tokens, self._held = self._held, []
        return self._decode(tokens)

    def flush(self) -> str:
        held, self._held = self._held, []
        if held:
            self._context = held[-1:]
            self._prefix = self._tokenizer.decode(self._context, self._skip)
        return "\ufffd" * len(held)

    def _decode(self, tokens: list[int]) -> str:
        """Return the text of the next tokens, which are complete characters, after the tokens of the last piece."""
        text = self._tokenizer.decode([*self._context, *tokens], self._skip)[len(self._prefix) :]
        self._context, self._prefix = tokens, self._tokenizer.decode(tokens, self._skip)
        return text


class _DecodingStream:
    """A stream for all other tokenizers: it decodes the new tokens after those of the last piece.

    A text that ends with U+FFFD may lack bytes, and is held back. If it has more than `MAX_HELD_TOKENS` tokens, they
    can't all belong to one character, and the text is returned as it is.
    """

    def __init__(self, tokenizer: Tokenizer, tail: Sequence[int], skip_special_tokens: bool):
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._context = _complete_suffix(tokenizer, tail, skip_special_tokens)  # the tokens of the last piece
        self._prefix = tokenizer.decode(self._context, skip_special_tokens)  # their text
        self._held: list[int] = []

    def feed(self, token: int) -> str:
        if not self._tokenizer.decoded_bytes(token, self._skip):
            return ""
        self._held.append(token)
        text = self._decode_held()
        if text.endswith("\ufffd") and len(self._held) <= MAX_HELD_TOKENS:
            return ""
        self._context, self._held = self._held, []
        self._prefix = self._tokenizer.decode(self._context, self._skip)
        return text

    def flush(self) -> str:
        text = self._decode_held() if self._held else ""
        self._held = []
        return text

    def _decode_held(self) -> str:
        return self._tokenizer.decode([*self._context, *self._held], self._skip)[len(self._prefix) :]


def _decode_complete(data: bytes) -> tuple[str, bytes]:
    """Return the text of ``data``, and the bytes at its end that can still become a character and are not in the text.

    As in Rust's `String::from_utf8_lossy`, which the library uses, each maximal part of a character is one U+FFFD.
    """
    text, used = codecs.utf_8_decode(data, "replace", False)
    rest = data[used:]
    # UTF-8 excludes surrogates, but Python's codec waits for the last byte of one.
    if rest[:1] == b"\xed" and rest[1:] >= b"\xa0":
        return text + rest.decode(errors="replace"), b""
    return text, rest


def _complete_suffix(tokenizer: Tokenizer, tail: Sequence[int], skip_special_tokens: bool) -> list[int]:
    """Return the longest suffix of the prompt's ``tail`` whose text ends with a complete character.

    The suffix is empty if the prompt ends in the middle of a character.
    """
    starts = range(len(tail) + 1)  # a tail that begins in the middle of a character can decode to U+FFFD to its end
    complete = (i for i in starts if not tokenizer.decode(tail[i:], skip_special_tokens).endswith("\ufffd"))
    return list(tail[next(complete) :])
