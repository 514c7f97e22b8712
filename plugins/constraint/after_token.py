"""Grammars that begin later in an answer, after a token such as ``</think>``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from minisgl.core import I32, InvalidRequestError, Req
from minisgl.hooks import hookimpl
from minisgl.plugins.constraint.base import Constraint, mask_of
from minisgl.sampling_params import Grammar

if TYPE_CHECKING:
    from minisgl.tokenizer.tokenizer import Tokenizer


@hookimpl(trylast=True)  # so the other plugins' constraints are around this one
def minisgl_wrap_constraint(req: Req, vocab_size: int, eos_ids: frozenset[int], tokenizer: Tokenizer | None) -> Any:
    grammar = req.params.grammar
    tokens = token_ids(grammar, tokenizer) if grammar is not None and tokenizer is not None else []
    return (lambda made: AfterToken(made, tokens, vocab_size, sorted(eos_ids))) if tokens else None


def token_ids(grammar: Grammar, tokenizer: Tokenizer) -> list[int]:
    """Return the ids of the tokens ``after`` and ``opener`` of a grammar, or none if it begins at once.

    A model without these tokens can't begin what ``opener`` begins. Raise `InvalidRequestError` if there is no
    token ``after``, and no ``opener``.
    """
    found = []
    for text in filter(None, (grammar.after, grammar.opener)):
        token = tokenizer.raw.token_to_id(text)
        if token is None and grammar.opener:
            return []
        if token is None:
            message = f"An answer can't follow a grammar after its reasoning: this model has no token {text!r}."
            raise InvalidRequestError(grammar.field, message)
        found.append(token)
    return found


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
