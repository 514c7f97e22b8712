"""Rules about single tokens: ``min_tokens``, ``bad_words`` and ``allowed_token_ids``, as masks of a request's tokens.

They are a `Constraint`, like a grammar, and may be around one. Only requests that ask for a rule have it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from minisgl.core import I32, InvalidRequestError, Req
from minisgl.hooks import hookimpl
from minisgl.plugins.constraint.base import Constraint, mask_of

if TYPE_CHECKING:
    from minisgl.tokenizer.tokenizer import Tokenizer

Words = Sequence[Sequence[int]]
"""Forbidden sequences of token ids."""


@hookimpl
def minisgl_wrap_constraint(req: Req, vocab_size: int, tokenizer: Tokenizer | None) -> Any:
    params = req.params
    words: Words = []
    if params.bad_words:
        if tokenizer is None:
            raise InvalidRequestError("bad_words", "This model has no tokenizer, so bad_words have no token ids.")
        words = bad_word_ids(params.bad_words, tokenizer.encode)
    if not words and params.allowed_token_ids is None and not (params.min_tokens and req.stop_ids):
        return None
    return partial(TokenRules, req, vocab_size=vocab_size, words=words)


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


_BITS = (np.uint32(1) << np.arange(32, dtype=np.uint32)).view(np.int32)
"""The bits of one word of a mask, by the token's id modulo 32."""
