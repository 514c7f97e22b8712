"""From a scheduler's outputs to text, request by request: whole characters only, stop strings found and cut.

Knows `core.Output` and the tokenizer, and no process: the server's detokenizer and ``LLM`` both drive it.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from tokenizers.decoders import DecodeStream

from minisgl.core import I32, Output, SamplingParams
from minisgl.message import Delta, TokenLogprob
from minisgl.tokenizer.stop import StopFinder
from minisgl.tokenizer.tokenizer import Tokenizer

TAIL = 8
"""How many of the prompt's last tokens are enough to decode what follows it as it would stand behind the prompt."""


class Detokenizer:
    """The text of every open request. Without a tokenizer it passes tokens through and their text is empty.

    Its driver calls `open` for each request that the scheduler accepted, `feed` with each output, in order, and aborts
    a request at the scheduler where a delta says ``stopped``: the scheduler's word on it then ends it with "stop".
    """

    def __init__(self, tokenizer: Tokenizer | None):
        self._tokenizer = tokenizer
        self._open: dict[int, _Request] = {}

    def __len__(self) -> int:
        return len(self._open)

    def open(self, uid: int, prompt: Sequence[int] | I32, params: SamplingParams) -> None:
        """Expect a request's tokens; ``prompt`` may be its last `TAIL` tokens only."""
        text = None
        if self._tokenizer is not None:
            text = TextStream(self._tokenizer, [int(i) for i in prompt[-TAIL:]], params.skip_special_tokens)
        self._open[uid] = _Request(text, StopFinder(params.stop) if params.stop and text is not None else None)

    def feed(self, output: Output) -> list[Delta]:
        """What each request gained; the last delta of each has its ``finish``. Requests that are not open (any more)
        are passed over."""
        ends = {end.uid: end for end in output.finished}
        last = dict(zip(output.uids, range(len(output.uids))))
        deltas: dict[int, Delta] = {}
        for i, (uid, token) in enumerate(zip(output.uids, output.tokens)):
            request = self._open.get(uid)
            if request is None or request.stopped:
                continue
            delta = deltas.setdefault(uid, Delta(uid))
            end = ends.get(uid)
            # The token that ended a request is counted and reported, but is not part of its text.
            silent = end is not None and last[uid] == i and end.stop_id == token
            request.take(token, delta, silent)
            if not silent and (logprobs := output.logprobs.get(i)) is not None:
                delta.logprobs.append(self._logprob(token, *logprobs))
        for uid, end in ends.items():
            request = self._open.pop(uid, None)
            if request is None:
                continue
            delta = deltas.setdefault(uid, Delta(uid))
            if not request.stopped:
                request.end(delta)
            if request.stopped:
                end = msgspec.structs.replace(end, reason="stop", output_tokens=request.count, stop_id=None, error="")
            delta.finish = end
        return list(deltas.values())

    def _logprob(self, token: int, chosen: float, ids: Sequence[int], values: Sequence[float]) -> TokenLogprob:
        return TokenLogprob(
            *self._token(token), chosen, [TokenLogprob(*self._token(t), v) for t, v in zip(ids, values)]
        )

    def _token(self, token: int) -> tuple[str, bytes]:
        if self._tokenizer is None:
            return f"token_id:{token}", b""
        raw = self._tokenizer.token_bytes(token)
        return raw.decode(errors="replace"), raw


class _Request:
    """One open request's text so far."""

    def __init__(self, text: TextStream | None, stops: StopFinder | None):
        self._text, self._stops = text, stops
        self.count = 0
        self.stopped = False

    def take(self, token: int, delta: Delta, silent: bool) -> None:
        self.count += 1
        delta.tokens.append(token)
        if self._text is not None and not silent:
            self._show(self._text.feed(token), delta)

    def end(self, delta: Delta) -> None:
        """No more tokens: what was held back can be shown, unless it completes a stop string."""
        if self._text is not None:
            self._show(self._text.flush(), delta)
        if self._stops is not None and not self.stopped:
            delta.text += self._stops.flush()

    def _show(self, text: str, delta: Delta) -> None:
        if self._stops is not None and text:
            text, delta.stopped = self._stops.feed(text)
            self.stopped = delta.stopped is not None
        delta.text += text


class TextStream:
    """Decodes one request's tokens as they come. A character whose bytes are spread over tokens comes when it is
    whole; all pieces together are what decoding all tokens at once gives."""

    def __init__(self, tokenizer: Tokenizer, tail: Sequence[int] = (), skip_special_tokens: bool = True):
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._shown = self._whole(tail)  # the tokens of the last piece, a context for the next
        self._waiting: list[int] = []  # tokens whose text is not whole yet
        self._stream = DecodeStream(ids=self._shown, skip_special_tokens=skip_special_tokens)

    def feed(self, token: int) -> str:
        """The text that this token completes; often that of the token, sometimes none."""
        self._waiting.append(token)
        try:
            piece = self._stream.step(self._tokenizer.raw, token)
        except Exception:  # "Invalid prefix": some decoders change earlier text in the light of later tokens
            piece = self._decode_waiting()
            self._stream = DecodeStream(ids=self._waiting, skip_special_tokens=self._skip)
        if not piece:
            return ""
        self._shown, self._waiting = self._waiting, []
        return piece

    def flush(self) -> str:
        """The text of tokens that never became whole characters; to be called when no more will come."""
        piece = self._decode_waiting() if self._waiting else ""
        self._waiting = []
        return piece

    def _whole(self, tail: Sequence[int]) -> list[int]:
        """As much of a prompt's end as ends with a whole character; nothing, where the prompt ends within one."""
        starts = range(len(tail) + 1)  # the tail itself may begin within one, which can spoil what follows
        whole = (i for i in starts if not self._tokenizer.decode(tail[i:], self._skip).endswith("\ufffd"))
        return list(tail[next(whole) :])

    def _decode_waiting(self) -> str:
        before = self._tokenizer.decode(self._shown, self._skip)
        return self._tokenizer.decode([*self._shown, *self._waiting], self._skip)[len(before) :]
