"""Rules about single tokens: ``min_tokens``, ``bad_words`` and ``allowed_token_ids``, as masks of a request's tokens.

They are a `Constraint`, like a grammar, and may be around one. Only requests that ask for a rule have it. `AfterToken`
is around a grammar that begins later in the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from minisgl.core import I32, InvalidRequestError, Req
from minisgl.scheduler.base import Constraint, mask_of

Words = Sequence[Sequence[int]]
"""Forbidden sequences of token ids."""


def with_rules(
    req: Req, grammar: Constraint | None, vocab_size: int, encode: Callable[[str, bool], list[int]] | None
) -> Constraint | None:
    """Return ``grammar`` with the request's rules, or ``grammar`` itself if it has none.

    ``encode(text, add_special_tokens)`` returns token ids; None: there is no tokenizer. Raise `InvalidRequestError` for
    bad words without a tokenizer.
    """
    params = req.params
    words: Words = []
    if params.bad_words:
        if encode is None:
            raise InvalidRequestError("bad_words", "This model has no tokenizer, so bad_words have no token ids.")
        words = bad_word_ids(params.bad_words, encode)
    if not words and params.allowed_token_ids is None and not (params.min_tokens and req.stop_ids):
        return grammar
    return TokenRules(req, grammar, vocab_size, words)


def bad_word_ids(words: Iterable[str], encode: Callable[[str, bool], list[int]]) -> Words:
    """Return the token ids of each word at the beginning of a text, and after a space if that is one other token."""
    found: list[list[int]] = []
    for word in words:
        plain, spaced = encode(word.lstrip(), False), encode(" " + word.lstrip(), False)
        found.append(plain)
        if plain and len(spaced) == len(plain) and spaced[0] != plain[0]:
            found.append(spaced)
    return [ids for ids in found if ids]


class TokenRules(Constraint):
    """The rules of one request.

    The end tokens are forbidden until the answer has ``min_tokens`` tokens, unless nothing else is allowed: a grammar
    that can only end, ends. The last token of a bad word is forbidden where the answer has its other tokens.
    """

    def __init__(self, req: Req, grammar: Constraint | None, vocab_size: int, words: Words):
        params = req.params
        self._grammar, self._words, self._min_tokens = grammar, words, params.min_tokens
        allowed = range(vocab_size) if params.allowed_token_ids is None else params.allowed_token_ids
        self._allowed = mask_of(allowed, vocab_size)
        self._ends = mask_of(req.stop_ids, vocab_size)
        self._tail: list[int] = list(req.output_ids)  # the last tokens, as many as a bad word can have
        self._longest = max(map(len, words), default=1) - 1
        self._num_tokens = len(req.output_ids)

    def advance(self, tokens: Sequence[int]) -> None:
        """Add sampled tokens to the request's output, in order."""
        self._num_tokens += len(tokens)
        self._tail = [*self._tail, *tokens][-self._longest :] if self._longest else []
        if self._grammar is not None:
            self._grammar.advance(tokens)

    def is_ready(self, seconds: float = 0.0) -> bool:
        return self._grammar is None or self._grammar.is_ready(seconds)

    def forced(self, count: int) -> Sequence[int]:
        """Return the tokens that the grammar forces: `Constraint.forced`."""
        return () if self._grammar is None else self._grammar.forced(count)

    def masks(self, drafts: Sequence[int]) -> I32:
        """Return the masks for the next token and for the token after each draft: `Constraint.masks`."""
        masks = np.repeat(self._allowed[None], 1 + len(drafts), axis=0)
        if self._grammar is not None:
            masks &= self._grammar.masks(drafts)
        text = [*self._tail, *drafts]
        for k, mask in enumerate(masks):
            before = text[: len(self._tail) + k]
            for *begin, last in self._words:
                if before[len(before) - len(begin) :] == begin:
                    mask[last // 32] &= ~np.int32(_BITS[last % 32])
            if self._num_tokens + k < self._min_tokens and (others := mask & ~self._ends).any():
                mask[:] = others
        return masks


class AfterToken(Constraint):
    """The constraint ``made`` of the text after a token, such as ``</think>``: before it, all but an end is allowed.

    ``tokens`` are the token and, if there may be no text before it, the token that begins this text.
    """

    def __init__(self, made: Constraint, tokens: Sequence[int], vocab_size: int, end_ids: Sequence[int]):
        self._made, self._after, self._opener = made, tokens[0], tokens[1] if len(tokens) > 1 else None
        self._state = "before" if self._opener is None else "start"
        self._free = ~mask_of(end_ids, vocab_size) & mask_of(range(vocab_size), vocab_size)
        self._opening = mask_of(tokens[1:], vocab_size)

    def _next(self, state: str, token: int) -> str:
        if state == "start":
            return "before" if token == self._opener else "made"
        return "made" if token == self._after else "before"

    def advance(self, tokens: Sequence[int]) -> None:
        for i, token in enumerate(tokens):
            if self._state == "made":
                self._made.advance(tokens[i:])
                return
            was_start, self._state = self._state == "start", self._next(self._state, token)
            if was_start and self._state == "made":
                self._made.advance([token])

    def is_ready(self, seconds: float = 0.0) -> bool:
        return self._made.is_ready(seconds)

    def forced(self, count: int) -> Sequence[int]:
        return self._made.forced(count) if self._state == "made" else ()

    def masks(self, drafts: Sequence[int]) -> I32:
        state = self._state
        found: list[I32] = []
        for i in range(len(drafts) + 1):
            if state == "start" and (i == len(drafts) or drafts[i] != self._opener):
                rest = self._made.masks(drafts[i:])
                rest[0] |= self._opening
                return np.concatenate([*found, rest])
            if state == "made":
                return np.concatenate([*found, self._made.masks(drafts[i:])])
            found.append((self._made.masks([]) | self._opening) if state == "start" else self._free[None])
            if i < len(drafts):
                state = self._next(state, drafts[i])
        return np.concatenate(found)


_BITS = (np.uint32(1) << np.arange(32, dtype=np.uint32)).view(np.int32)
"""The bits of one word of a mask, by the token's id modulo 32."""
