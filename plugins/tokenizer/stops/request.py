"""A request whose text ends at a stop string: `StoppingRequest`. Without this plugin, such requests are refused.

`minisgl.tokenizer.detokenizer` builds one for each request with stop strings, and the caller of the detokenizer aborts
the request when it has found one.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from minisgl.core import Finished, InvalidRequestError, SamplingParams
from minisgl.message import Delta
from minisgl.plugins.tokenizer.stops.finder import StopFinder
from minisgl.sampling_params import shorten
from minisgl.tokenizer.detokenizer import RequestText
from minisgl.tokenizer.text_stream import TextStream
from minisgl.tokenizer.tokenizer import Tokenizer


def check(params: SamplingParams, tokenizer: Tokenizer | None) -> None:
    """Raise `InvalidRequestError` for a stop string that could never be found.

    If special tokens are left out of the text, a stop string that has one beside other text is such a string.
    """
    if tokenizer is None:
        raise InvalidRequestError(
            "stop", "This model has no tokenizer, so it can't stop at strings: use stop_token_ids."
        )
    for stop in params.stop if params.skip_special_tokens else ():
        inside = next((text for text in tokenizer.special_ids if text in stop), None)
        if inside is not None and stop not in tokenizer.special_ids:
            raise InvalidRequestError(
                "stop",
                f"The stop string {shorten(repr(stop))} has the special token {shorten(repr(inside))} beside other "
                "text. Special tokens are left out of the text, so it would never be found: give the special token "
                "alone, or set skip_special_tokens to false.",
            )


def special_stops(tokenizer: Tokenizer, stops: Sequence[str]) -> dict[int, str]:
    """Return the stop strings that are one special token, which may have no text: id of the token → stop string."""
    return {tokenizer.special_ids[stop]: stop for stop in stops if stop in tokenizer.special_ids}


class StoppingRequest(RequestText):
    """The detokenization state of a request with stop strings.

    No text of the first ``min_tokens`` tokens is a stop string. If the text ends with one, the caller aborts the
    request, and ``finish`` changes its finish reason "abort" to "stop".
    """

    def __init__(self, text: TextStream, params: SamplingParams, tokenizer: Tokenizer):
        super().__init__(text, params)
        self._stream, self._min_tokens, self._num_tokens = text, params.min_tokens, 0
        self._stops = StopFinder(params.stop, params.include_stop_str_in_output)
        self._stop_tokens = special_stops(tokenizer, params.stop)

    def add_token(self, token: int, delta: Delta, hidden: bool) -> None:
        before = self._num_tokens
        self._num_tokens += 1
        if not hidden and token in self._stop_tokens and before >= self._min_tokens:
            self._stop_at(token, delta)
            return
        super().add_token(token, delta, hidden)
        # Text that is held back may have a stop string already. If the request ends with it, the text is complete.
        searched = not hidden and not self.stopped and self._num_tokens > self._min_tokens
        if searched and self._stops.ends_in(self._stream.pending):
            self.add_text(self._stream.flush(), delta)

    def _stop_at(self, token: int, delta: Delta) -> None:
        """Add an output token that is a stop string. Like a stop token, it is not part of the text."""
        delta.tokens.append(token)
        self.flush(delta)
        if not self.stopped:  # otherwise, the text that was held back completed another stop string
            delta.matched_stop, self.stopped = self._stop_tokens[token], True
            delta.text += delta.matched_stop if self.include_stop else ""

    def flush(self, delta: Delta) -> None:
        """Add the text that was held back, unless that text completes a stop string."""
        super().flush(delta)
        if not self.stopped:
            delta.text += self._stops.flush()

    def add_text(self, text: str, delta: Delta) -> None:
        if text and self._num_tokens > self._min_tokens:
            text, delta.matched_stop = self._stops.feed(text)
            self.stopped = delta.matched_stop is not None
        delta.text += text

    def finish(self, end: Finished, delta: Delta) -> None:
        if not self.stopped:
            self.flush(delta)
        if self.stopped:
            end = msgspec.structs.replace(
                end, finish_reason="stop", output_tokens=self._num_tokens, stop_id=None, error=""
            )
        delta.finish = end
