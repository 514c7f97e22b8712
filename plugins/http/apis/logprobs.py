"""The log-probabilities of tokens with the tokens' texts: `LogprobTexts` adds them to the deltas of a detokenizer.

The detokenizer's process imports this module for the first request that asks for log-probabilities, and the API server
reads them from `Delta.logprobs` and `Delta.prompt_logprobs`. The module imports no HTTP library.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence, Set

import msgspec

from minisgl.core import Finished, LogprobsEntry, Output, SamplingParams
from minisgl.message import Delta, NewRequest
from minisgl.tokenizer.tokenizer import Tokenizer


class TokenLogprob(msgspec.Struct, array_like=True):
    """One output token with its log-probability.

    ``raw`` are the token's bytes, and ``text`` is ``raw`` decoded. ``top`` are the most likely tokens at the same
    position, in descending order of probability. Without a tokenizer, ``text`` is ``token_id:<id>``, and ``raw`` is
    empty.
    """

    text: str
    raw: bytes
    logprob: float
    top: list[TokenLogprob] = []


class PromptLogprob(msgspec.Struct, array_like=True):
    """The log-probability of one token at a position of the prompt.

    ``rank`` is 1 for the most likely token. It is None for a prompt token that is not among the reported alternatives.
    ``text`` and ``raw`` are those of `TokenLogprob`.
    """

    token: int
    text: str
    logprob: float
    rank: int | None
    raw: bytes = b""


class LogprobTexts:
    """The open requests that ask for log-probabilities. ``tokenizer`` is None for a model without one."""

    def __init__(self, tokenizer: Tokenizer | None):
        self._tokenizer = tokenizer
        self._requests: dict[int, _Request] = {}

    def add_request(self, req: NewRequest) -> None:
        """Add a request. Its ``prompt_tail`` is the whole prompt if it asks for the prompt's log-probabilities."""
        special = {} if self._tokenizer is None else self._tokenizer.special_ids
        stops = {special[stop] for stop in req.params.stop if stop in special}
        self._requests[req.uid] = _Request(req.params, stops, req.prompt_tail)

    def add_to(self, deltas: Sequence[Delta], output: Output) -> list[Delta]:
        """Return the deltas of one output of the scheduler, with the log-probabilities of their tokens.

        The log-probabilities of a prompt may come in a delta of their own.
        """
        if not self._requests:
            return list(deltas)
        by_uid = {delta.uid: delta for delta in deltas}
        for uid, entries in output.prompt_logprobs.items():
            if uid in self._requests:
                by_uid.setdefault(uid, Delta(uid)).prompt_logprobs += self._prompt_positions(
                    self._requests[uid], entries
                )
        ends = {end.uid: end for end in output.finished}
        totals, counts = Counter(output.uids), Counter[int]()
        for i, uid in enumerate(output.uids):
            request, delta = self._requests.get(uid), by_uid.get(uid)
            if request is not None and delta is not None and i in output.logprobs:
                is_shown = counts[uid] < request.num_shown(delta, ends.get(uid), totals[uid])
                delta.logprobs += [self._token_logprob(output.tokens[i], *output.logprobs[i])] if is_shown else []
            counts[uid] += 1
        for uid in ends:
            request = self._requests.pop(uid, None)
            if request is not None and uid in by_uid:
                by_uid[uid].prompt_logprobs += request.missing_positions(len(request.prompt_ids))
        return list(by_uid.values())

    def _prompt_positions(
        self, request: _Request, entries: Sequence[LogprobsEntry]
    ) -> list[list[PromptLogprob] | None]:
        """Return the log-probabilities of the next positions of a prompt: the prompt's token first, as in vLLM."""
        positions = request.missing_positions(request.start)
        for chosen, ids, values in entries:
            token = request.prompt_ids[request.num_positions]
            request.num_positions += 1
            rank = ids.index(token) + 1 if token in ids else None
            text, raw = self._text(token)
            position = [PromptLogprob(token, text, chosen, rank, raw)]
            for i, (other, value) in enumerate(zip(ids, values)):
                if other != token:
                    text, raw = self._text(other)
                    position.append(PromptLogprob(other, text, value, i + 1, raw))
            positions.append(position)
        return positions

    def _token_logprob(self, token: int, chosen: float, ids: Sequence[int], values: Sequence[float]) -> TokenLogprob:
        return TokenLogprob(*self._text(token), chosen, [TokenLogprob(*self._text(t), v) for t, v in zip(ids, values)])

    def _text(self, token: int) -> tuple[str, bytes]:
        if self._tokenizer is None:
            return f"token_id:{token}", b""
        raw = self._tokenizer.token_bytes(token)
        return raw.decode(errors="replace"), raw


class _Request:
    """What is known of a request. ``stop_tokens`` are the ids of the special tokens that are stop strings.

    ``prompt_ids`` is empty unless the request asks for the prompt's log-probabilities. They begin at ``start``.
    """

    def __init__(self, params: SamplingParams, stop_tokens: Set[int], prompt_ids: list[int]):
        self._include_stop, self._stop_tokens = params.include_stop_str_in_output, stop_tokens
        self.prompt_ids = prompt_ids if params.prompt_logprobs is not None else []
        self.start = min(max(params.logprob_start_len, 1), len(self.prompt_ids))
        self.num_positions = 0  # the positions of the prompt that were reported, with log-probabilities or None

    def num_shown(self, delta: Delta, end: Finished | None, num_tokens: int) -> int:
        """Return how many tokens of a delta have log-probabilities: a stop token or stop string at its end has none.

        ``num_tokens`` is the number of the request's tokens in the scheduler's output. ``end`` is its end, if any.
        """
        if not delta.tokens:
            return 0
        last = delta.tokens[-1]
        is_stop = end is not None and end.stop_id == last and len(delta.tokens) == num_tokens
        hidden = (is_stop and not self._include_stop) or (delta.matched_stop is not None and last in self._stop_tokens)
        return len(delta.tokens) - hidden

    def missing_positions(self, end: int) -> list[list[PromptLogprob] | None]:
        """Report the positions of the prompt up to ``end`` as positions without log-probabilities."""
        missing = max(end - self.num_positions, 0)
        self.num_positions += missing
        return [None] * missing
