"""Incremental detokenization: converts the scheduler's outputs to text, for each request.

The text is released in complete characters. This module knows `core.Output` and the
tokenizer, but not processes: the server's detokenizer process and ``LLM`` both use it.
"""

from __future__ import annotations

from collections.abc import Sequence

from minisgl.core import I32, Finished, InvalidRequestError, Output, SamplingParams
from minisgl.message import Delta
from minisgl.plugin_manager.discovery import exists, import_module
from minisgl.tokenizer.text_stream import TextStream
from minisgl.tokenizer.tokenizer import Tokenizer

PROMPT_TAIL_TOKENS = 8
"""The number of prompt tokens that the detokenizer needs: the last tokens of the prompt, as context for the output.

Some decoders give a token another text at the beginning of a text than after other tokens.
"""
STOPS = "minisgl.plugins.tokenizer.stops.request"
"""The plugin that ends a request's text at a stop string."""


def check_stops(params: SamplingParams, tokenizer: Tokenizer | None) -> None:
    """Raise `InvalidRequestError` for a stop string that could never be found."""
    if params.stop and not exists(STOPS):
        raise InvalidRequestError("stop", "Stop strings need the plugin plugins/tokenizer/stops, which is missing.")
    if params.stop:
        import_module(STOPS, STOPS).check(params, tokenizer)


class Detokenizer:
    """The detokenization state of every open request.

    With ``tokenizer=None`` the deltas have token ids and empty text. The caller calls `add_request` for each request
    that the scheduler accepted, and `feed` with each output of the scheduler, in order. If a delta has ``matched_stop``
    and no ``finish``, the caller aborts the request at the scheduler, whose output then reports that it has ended.
    """

    def __init__(self, tokenizer: Tokenizer | None):
        self._tokenizer = tokenizer
        self._requests: dict[int, RequestText] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def add_request(self, uid: int, prompt_ids: Sequence[int] | I32, params: SamplingParams) -> None:
        """Add a request. ``prompt_ids`` are its prompt's token ids, or only the last `PROMPT_TAIL_TOKENS` of them."""
        text: TextStream | None = None
        if self._tokenizer is not None:
            tail = [int(i) for i in prompt_ids[-PROMPT_TAIL_TOKENS:]]
            text = self._tokenizer.stream(tail, params)
        if params.stop and text is not None:
            self._requests[uid] = import_module(STOPS, STOPS).StoppingRequest(text, params, self._tokenizer)
        else:
            self._requests[uid] = RequestText(text, params)

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
            request.add_token(token, delta, hidden)
        for uid, end in ends.items():
            if (request := self._requests.pop(uid, None)) is not None:
                request.finish(end, deltas.setdefault(uid, Delta(uid)))
        return list(deltas.values())


class RequestText:
    """The detokenization state of one request. ``stopped``: its text has ended, and no further token counts.

    With ``include_stop``, a stop token is part of the text. A plugin's class ends the text at a stop string.
    """

    stopped = False

    def __init__(self, text: TextStream | None, params: SamplingParams):
        self._text, self.include_stop = text, params.include_stop_str_in_output

    def add_token(self, token: int, delta: Delta, hidden: bool) -> None:
        """Add an output token to the delta, and the text that the token completes unless the token is ``hidden``."""
        delta.tokens.append(token)
        if self._text is not None and not hidden:
            self.add_text(self._text.feed(token), delta)

    def add_text(self, text: str, delta: Delta) -> None:
        """Add text that is complete to the delta."""
        delta.text += text

    def flush(self, delta: Delta) -> None:
        """Add the text that was held back to the delta."""
        if self._text is not None:
            self.add_text(self._text.flush(), delta)

    def finish(self, end: Finished, delta: Delta) -> None:
        """Add the end of the request to its last delta, and the text that was held back."""
        self.flush(delta)
        delta.finish = end
