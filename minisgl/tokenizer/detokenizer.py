"""Incremental detokenization: converts the scheduler's outputs to text, for each request.

The text is released in complete characters, and ends before a stop string. This module knows `core.Output` and the
tokenizer, but not processes: the server's detokenizer process and ``LLM`` both use it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from minisgl.core import I32, InvalidRequestError, Output, SamplingParams
from minisgl.message import Delta
from minisgl.tokenizer.stop import StopFinder
from minisgl.tokenizer.text_stream import TextStream
from minisgl.tokenizer.tokenizer import Tokenizer

PROMPT_TAIL_TOKENS = 8
"""The number of prompt tokens that the detokenizer needs: the last tokens of the prompt, as context for the output.

Some decoders give a token another text at the beginning of a text than after other tokens.
"""


def check_stops(params: SamplingParams, tokenizer: Tokenizer | None) -> None:
    """Raise `InvalidRequestError` for a stop string that could never be found."""
    if tokenizer is not None:
        tokenizer.stop_tokens(params.stop, params.skip_special_tokens)
    elif params.stop:
        raise InvalidRequestError(
            "stop", "This model has no tokenizer, so it can't stop at strings: use stop_token_ids."
        )


class Detokenizer:
    """The detokenization state of every open request.

    With ``tokenizer=None`` the deltas have token ids and empty text. The caller calls `add_request` for each request
    that the scheduler accepted, and `feed` with each output of the scheduler, in order. If a delta has ``matched_stop``
    and no ``finish``, the caller aborts the request at the scheduler. The scheduler's output then reports the request
    as aborted, and the detokenizer changes the finish reason "abort" to "stop".
    """

    def __init__(self, tokenizer: Tokenizer | None):
        self._tokenizer = tokenizer
        self._requests: dict[int, _Request] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def add_request(self, uid: int, prompt_ids: Sequence[int] | I32, params: SamplingParams) -> None:
        """Add a request. ``prompt_ids`` are its prompt's token ids, or only the last `PROMPT_TAIL_TOKENS` of them."""
        text: TextStream | None = None
        if self._tokenizer is not None:
            tail = [int(i) for i in prompt_ids[-PROMPT_TAIL_TOKENS:]]
            text = self._tokenizer.stream(tail, params)
        include = params.include_stop_str_in_output
        stops = StopFinder(params.stop, include) if params.stop and text is not None else None
        stop_tokens = {} if self._tokenizer is None else self._tokenizer.stop_tokens(params.stop, False)
        self._requests[uid] = _Request(text, stops, stop_tokens, params)

    def feed(self, output: Output) -> list[Delta]:
        """Detokenize one output of the scheduler. Return one delta for each request in the output.

        The last delta of a request has its ``finish``, and removes the request. Requests that were never added, or that
        have already finished, are ignored.
        """
        ends = {end.uid: end for end in output.finished}
        last = dict(zip(output.uids, range(len(output.uids))))
        deltas: dict[int, Delta] = {}
        for i, (uid, token) in enumerate(zip(output.uids, output.tokens)):
            request = self._requests.get(uid)
            if request is None or request.stopped:
                continue
            delta = deltas.setdefault(uid, Delta(uid))
            end = ends.get(uid)
            # A stop token (EOS, stop_token_ids) is counted and reported as a token, but is not part of the text.
            hidden = end is not None and last[uid] == i and end.stop_id == token and not request.include_stop
            if not hidden and token in request.stop_tokens and request.num_tokens >= request.min_tokens:
                request.stop_at(token, delta)
                continue
            request.add_token(token, delta, hidden)
        for uid, end in ends.items():
            request = self._requests.pop(uid, None)
            if request is None:
                continue
            delta = deltas.setdefault(uid, Delta(uid))
            if not request.stopped:
                request.flush(delta)
            if request.stopped:
                end = msgspec.structs.replace(
                    end, finish_reason="stop", output_tokens=request.num_tokens, stop_id=None, error=""
                )
            delta.finish = end
        return list(deltas.values())


class _Request:
    """The detokenization state of one request. ``stopped`` is true once a stop string was found.

    ``stop_tokens`` are the stop strings that are one special token, by the id of the token. No text of the first
    ``min_tokens`` tokens is a stop string.
    """

    def __init__(
        self,
        text: TextStream | None,
        stops: StopFinder | None,
        stop_tokens: Mapping[int, str],
        params: SamplingParams,
    ):
        self.min_tokens, self.include_stop = params.min_tokens, params.include_stop_str_in_output
        self._text, self._stops = text, stops
        self.stop_tokens = stop_tokens
        self.num_tokens = 0
        self.stopped = False

    def add_token(self, token: int, delta: Delta, hidden: bool) -> None:
        """Add an output token to the delta, and the text that the token completes unless the token is ``hidden``."""
        self.num_tokens += 1
        delta.tokens.append(token)
        if self._text is not None and not hidden:
            self._add_text(self._text.feed(token), delta)
            # Text that is held back may have a stop string already. If the request ends with it, the text is complete.
            searched = not self.stopped and self.num_tokens > self.min_tokens
            if self._stops is not None and searched and self._stops.ends_in(self._text.pending):
                self._add_text(self._text.flush(), delta)

    def stop_at(self, token: int, delta: Delta) -> None:
        """Add an output token that is a stop string. Like a stop token, it is not part of the text."""
        self.num_tokens += 1
        delta.tokens.append(token)
        self.flush(delta)
        if not self.stopped:  # otherwise, the text that was held back completed another stop string
            delta.matched_stop, self.stopped = self.stop_tokens[token], True
            delta.text += delta.matched_stop if self.include_stop else ""

    def flush(self, delta: Delta) -> None:
        """Add the text that was held back to the request's last delta, unless that text completes a stop string."""
        if self._text is not None:
            self._add_text(self._text.flush(), delta)
        if self._stops is not None and not self.stopped:
            delta.text += self._stops.flush()

    def _add_text(self, text: str, delta: Delta) -> None:
        if self._stops is not None and text and self.num_tokens > self.min_tokens:
            text, delta.matched_stop = self._stops.feed(text)
            self.stopped = delta.matched_stop is not None
        delta.text += text
