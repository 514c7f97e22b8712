"""Text streams for decoders that are not byte-level, and the cleaning of spaces.

``clean_up_tokenization_spaces`` in ``tokenizer_config.json`` asks for the cleaning: it removes spaces before
punctuation. transformers does this to the text that WordPiece and Unigram tokenizers decode, and never to that of BPE
tokenizers.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from minisgl.core import SamplingParams
from minisgl.tokenizer.text_stream import TextStream
from minisgl.tokenizer.tokenizer import Tokenizer

MAX_CONTEXT = 16
"""The largest number of tokens that a stream decodes again before each new token, as its context."""
PENDING_CHARS = SamplingParams.MAX_STOP_CHARS
"""The largest length of `TextStream.pending`: a stop string fits into it."""

_REPLACED = (
    (" .", "."),
    (" ?", "?"),
    (" !", "!"),
    (" ,", ","),
    (" ' ", "'"),
    (" n't", "n't"),
    (" 'm", "'m"),
    (" 's", "'s"),
    (" 've", "'ve"),
    (" 're", "'re"),
)
"""The texts that are replaced, one kind after the other in this order."""


def clean_up(text: str) -> str:
    """Return a text without spaces before punctuation."""
    for old, new in _REPLACED:
        text = text.replace(old, new)
    return text


class CleanUp:
    """`clean_up` of a text that arrives in pieces. The pieces that it returns are together the text of `clean_up`."""

    def __init__(self) -> None:
        self._held = [""] * len(_REPLACED)  # for each kind, the end of the text so far that may begin a match

    def feed(self, text: str) -> str:
        """Return the text that is complete with this piece."""
        for i, (old, new) in enumerate(_REPLACED):
            head, _, rest = (self._held[i] + text).rpartition(old)
            if _:
                head = head.replace(old, new) + new
            length = next(n for n in range(min(len(rest), len(old) - 1), -1, -1) if rest.endswith(old[:n]))
            text, self._held[i] = head + rest[: len(rest) - length], rest[len(rest) - length :]
        return text

    def flush(self) -> str:
        """Return the text that was held back. Call this after the last piece."""
        text = ""
        for i, (old, new) in enumerate(_REPLACED):
            text, self._held[i] = (self._held[i] + text).replace(old, new), ""
        return text


class CleanStream:
    """A text stream, which ``make`` makes of the other arguments, but its text is cleaned up."""

    pending = ""

    def __init__(
        self,
        make: Callable[[Tokenizer, Sequence[int], bool], TextStream],
        tokenizer: Tokenizer,
        tail: Sequence[int],
        skip_special_tokens: bool,
    ):
        self._stream, self._clean_up = make(tokenizer, tail, skip_special_tokens), CleanUp()

    def feed(self, token: int) -> str:
        return self._clean_up.feed(self._stream.feed(token))

    def flush(self) -> str:
        return self._clean_up.feed(self._stream.flush()) + self._clean_up.flush()


def is_local(parts: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a later token leaves the text of the tokens before it as it is.

    ``parts`` are those of the decoder. Otherwise, the text is changed after the tokens' texts were joined. Raise
    ValueError for a decoder that is not supported.
    """
    if any(part["type"] == "Strip" and part["stop"] for part in parts):
        raise ValueError("The decoder strips the end of a text, in which the library fails for short texts.")
    kinds = [part["type"] for part in parts]
    if kinds == ["ByteLevel"]:
        return True
    joined = kinds.index("Fuse") + 1 if "Fuse" in kinds else len(kinds)
    return "ByteLevel" not in kinds and all(kind in ("Fuse", "Strip") for kind in kinds[joined:])


class TokenStream:
    """A stream for tokenizers that decode one token after the other, as of Llama 2, Gemma, BERT and T5.

    A new token is decoded after the tokens before it, the *context*, because its text may depend on them. In a
    tokenizer with byte fallback, as of Llama 2, bytes without a token of their own are byte tokens. The library decodes
    a run of byte tokens to one U+FFFD per byte if the run is not valid UTF-8 as a whole. So the text of a run is
    complete with the next token of another kind, or with the first invalid byte. ``fallback_bytes`` are these tokens:
    token id → byte.
    """

    def __init__(
        self, fallback_bytes: Mapping[int, int], tokenizer: Tokenizer, tail: Sequence[int], skip_special_tokens: bool
    ):
        self._fallback_bytes, self._tokenizer, self._skip = fallback_bytes, tokenizer, skip_special_tokens
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
        byte = self._fallback_bytes.get(token)
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


def _complete_suffix(tokenizer: Tokenizer, tail: Sequence[int], skip_special_tokens: bool) -> list[int]:
    """Return the longest suffix of the prompt's ``tail`` whose text ends with a complete character.

    The suffix is empty if the prompt ends in the middle of a character.
    """
    starts = range(len(tail) + 1)  # a tail that begins in the middle of a character can decode to U+FFFD to its end
    complete = (i for i in starts if not tokenizer.decode_raw(tail[i:], skip_special_tokens).endswith("\ufffd"))
    return list(tail[next(complete) :])
