"""Text streams: the output tokens of one request become text, token by token.

The pieces of a stream are together the text of `Tokenizer.decode` for all tokens at once. So a stream holds back what
later tokens may still change. For a byte-level tokenizer, these are the bytes at the end that can still become a
character: at most three, because a character has at most four bytes in UTF-8. For other tokenizers it is all text here;
`tokenizer=auto` has streams that know more of their decoders. This module knows the tokenizer, but neither requests nor
stop strings.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from minisgl.tokenizer.tokenizer import Tokenizer


class TextStream(Protocol):
    """An incremental decoder for the output tokens of one request."""

    @property
    def pending(self) -> str:
        """The end of the text that is held back: a stop string fits into it.

        It is empty unless `flush` would return complete characters.
        """

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


class WholeStream:
    """A stream for all other tokenizers: the whole text comes at the end, after the last token.

    The text of a token may depend on the tokens before it, ``tail`` at first, and on those after it.
    """

    pending = ""

    def __init__(self, tokenizer: Tokenizer, tail: Sequence[int], skip_special_tokens: bool):
        self._tokenizer, self._skip, self._tokens = tokenizer, skip_special_tokens, list(tail)
        self._prefix = tokenizer.decode_raw(tail, skip_special_tokens)

    def feed(self, token: int) -> str:
        self._tokens.append(token)
        return ""

    def flush(self) -> str:
        text, self._prefix = self._prefix, self._tokenizer.decode_raw(self._tokens, self._skip)
        return self._prefix[len(text) :]


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
