"""Text streams: the output tokens of one request become text, token by token.

The pieces of a stream are together the text of `Tokenizer.decode` for all tokens at once. So a stream holds back what
later tokens may still change. For a byte-level tokenizer, these are the bytes at the end that can still become a
character: at most three, because a character has at most four bytes in UTF-8. For a tokenizer with byte tokens, it is
a run of byte tokens. This module knows the tokenizer, but neither requests nor stop strings.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from minisgl.core import SamplingParams

if TYPE_CHECKING:
    from minisgl.tokenizer.tokenizer import Tokenizer

MAX_CONTEXT = 16
"""The largest number of tokens that a stream decodes again before each new token, as its context."""

PENDING_CHARS = SamplingParams.MAX_STOP_CHARS
"""The largest length of `TextStream.pending`: a stop string fits into it."""


class TextStream(Protocol):
    """An incremental decoder for the output tokens of one request."""

    @property
    def pending(self) -> str:
        """The end of the text that is held back. It is empty unless `flush` would return complete characters."""

    def feed(self, token: int) -> str:
        """Return the text that this token completes: often the token's own text, sometimes an empty text."""

    def flush(self) -> str:
        """Return the text that was held back. Call this after the last token."""


class ByteLevelStream:
    """A stream for byte-level tokenizers, as of GPT-2 and Qwen: the text is the UTF-8 decoding of the tokens' bytes.

    A token's text does not depend on the tokens before it, so the prompt is not needed.
    """

    pending = ""

    def __init__(self, tokenizer: Tokenizer, tail: Sequence[int], skip_special_tokens: bool):
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._held = b""  # the beginning of a character: at most three bytes

    def feed(self, token: int) -> str:
        data = self._held + self._tokenizer.decoded_bytes(token, self._skip)
        text, self._held = _decode_complete(data)
        return text

    def flush(self) -> str:
        held, self._held = self._held, b""
        return held.decode(errors="replace")


class TokenStream:
    """A stream for tokenizers that decode one token after the other, as of Llama 2, Gemma, BERT and T5.

    A new token is decoded after the tokens before it, the *context*, because its text may depend on them. In a
    tokenizer with byte fallback, as of Llama 2, bytes without a token of their own are byte tokens. The library decodes
    a run of byte tokens to one U+FFFD per byte if the run is not valid UTF-8 as a whole. So the text of a run is
    complete with the next token of another kind, or with the first invalid byte.
    """

    def __init__(self, tokenizer: Tokenizer, tail: Sequence[int], skip_special_tokens: bool):
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._context: list[int] = []  # the last tokens that were decoded
        self._prefix = ""  # their text
        self._run: list[int] = []  # a run of byte tokens that is valid so far
        self._characters = ""  # the last characters of the run
        self._check = codecs.getincrementaldecoder("utf-8")()  # raises an error for the first invalid byte of the run
        self._invalid = False  # whether the current run of byte tokens is invalid
        self._set_context(_complete_suffix(tokenizer, tail, skip_special_tokens))

    def feed(self, token: int) -> str:
        if self._tokenizer.is_dropped(token, self._skip):
            return ""
        byte = self._tokenizer.fallback_bytes.get(token)
        if byte is None:
            text = self.flush()
            self._invalid = False
            return text + self._decode([token])
        self._run.append(token)
        if not self._invalid:
            try:
                self._characters += self._check.decode(bytes([byte]))
                self._characters = self._characters[-PENDING_CHARS:]
                return ""
            except UnicodeDecodeError:
                self._invalid = True
        return self._replace_run()

    @property
    def pending(self) -> str:
        return self._characters if self._check.getstate()[0] == b"" else ""

    def flush(self) -> str:
        if not self._run:
            return ""
        if self._check.getstate()[0]:  # the beginning of a character
            return self._replace_run()
        self._check.reset()
        run, self._run, self._characters = self._run, [], ""
        return self._decode(run)

    def _replace_run(self) -> str:
        run, self._run, self._characters = self._run, [], ""
        self._check.reset()
        self._set_context([*self._context, *run][-MAX_CONTEXT:])  # the last byte alone may be a space
        return "\ufffd" * len(run)

    def _decode(self, tokens: list[int]) -> str:
        """Return the text of the next tokens after the context, and add them to the context."""
        context = [*self._context, *tokens]
        text = self._tokenizer.decode_raw(context, self._skip)[len(self._prefix) :]
        # A context of spaces alone could lose them, because decoders strip spaces at the beginning of a text.
        self._set_context(tokens if text.strip() else context[-MAX_CONTEXT:])
        return text

    def _set_context(self, tokens: list[int]) -> None:
        self._context, self._prefix = tokens, self._tokenizer.decode_raw(tokens, self._skip)


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
    complete = (i for i in starts if not tokenizer.decode_raw(tail[i:], skip_special_tokens).endswith("\ufffd"))
    return list(tail[next(complete) :])
