"""Text streams for the decoders that the core's streams do not know, and the cleaning of spaces.

``clean_up_tokenization_spaces`` in ``tokenizer_config.json`` asks for the cleaning: it removes spaces before
punctuation. transformers does this to the text that WordPiece and Unigram tokenizers decode, and never to that of BPE
tokenizers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from minisgl.tokenizer.text_stream import TextStream
from minisgl.tokenizer.tokenizer import Tokenizer

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


class WholeStream:
    """A stream for a decoder in which a later token may change all text before it: the text comes at the end."""

    pending = ""

    def __init__(self, tokenizer: Tokenizer, tail: Sequence[int], skip_special_tokens: bool):
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._tokens: list[int] = []

    def feed(self, token: int) -> str:
        self._tokens.append(token)
        return ""

    def flush(self) -> str:
        tokens, self._tokens = self._tokens, []
        return self._tokenizer.decode_raw(tokens, self._skip)
