"""Removes spaces before punctuation, as ``clean_up_tokenization_spaces`` in ``tokenizer_config.json`` asks for.

transformers does this to the text that WordPiece and Unigram tokenizers decode, and never to that of BPE tokenizers.
"""

from __future__ import annotations

from minisgl.tokenizer.text_stream import TextStream

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
    """A text stream whose text is cleaned up."""

    pending = ""

    def __init__(self, stream: TextStream):
        self._stream, self._clean_up = stream, CleanUp()

    def feed(self, token: int) -> str:
        return self._clean_up.feed(self._stream.feed(token))

    def flush(self) -> str:
        return self._clean_up.feed(self._stream.flush()) + self._clean_up.flush()
