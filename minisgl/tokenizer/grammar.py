"""What checks the grammars of requests and makes the masks of their tokens: a plugin of the group ``grammar``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from minisgl.core import I32
from minisgl.sampling_params import Grammar, InvalidRequestError

if TYPE_CHECKING:
    from minisgl.plugin_manager.manager import PluginManager
    from minisgl.scheduler.base import Constraint
    from minisgl.tokenizer.tokenizer import Tokenizer


class Grammars(Protocol):
    """What a plugin of the group ``grammar`` builds: it knows the tokenizer, and reads grammars."""

    def check(self, grammar: Grammar) -> None:
        """Raise `InvalidRequestError` for a grammar that is wrong or not supported. Called in a tokenizer's process."""

    def constraint(self, grammar: Grammar, vocab_size: int, end_ids: Sequence[int]) -> Constraint:
        """Return the constraint of a new request, whose grammar was checked. Called in rank 0's process.

        It must return soon, since all other requests wait. Masks have ``vocab_size`` tokens. The tokens ``end_ids`` end
        an answer: they are allowed where the grammar allows an end.
        """


class LazyGrammars:
    """The part of the group ``grammar``, built for the first request that has a grammar.

    ``options()`` returns the options of the part, or None if there is none. Without a part or a tokenizer, each grammar
    is refused.
    """

    def __init__(self, options: Callable[[], Any], manager: PluginManager, tokenizer: Tokenizer | None):
        self._options, self._manager, self._tokenizer = options, manager, tokenizer
        self._made: Grammars | None = None

    def _make(self, grammar: Grammar) -> Grammars:
        if self._made is None:
            options = None if self._tokenizer is None else self._options()
            if options is None:
                raise InvalidRequestError(
                    grammar.field,
                    "An answer can't follow a grammar here: there is no tokenizer, or no plugin of the group grammar.",
                )
            self._made = self._manager.build("grammar", options, tokenizer=self._tokenizer)
        return self._made

    def check(self, grammar: Grammar | None) -> None:
        """Raise `InvalidRequestError` for a grammar that can't be used. None is a request without a grammar."""
        if grammar is not None:
            self._make(grammar).check(grammar)
            self._tokens(grammar)

    def constraint(self, grammar: Grammar | None, vocab_size: int, end_ids: Sequence[int]) -> Constraint | None:
        """Return the constraint of a new request, or None if it has no grammar."""
        if grammar is None:
            return None
        made = self._make(grammar).constraint(grammar, vocab_size, end_ids)
        tokens = self._tokens(grammar)
        return AfterToken(made, tokens, vocab_size, end_ids) if tokens else made

    def _tokens(self, grammar: Grammar) -> list[int]:
        """Return the ids of the tokens ``after`` and ``opener`` of a grammar, or none if it begins at once.

        A model without these tokens can't begin what ``opener`` begins. Raise `InvalidRequestError` if there is no
        token ``after``, and no ``opener``.
        """
        assert self._tokenizer is not None
        found = []
        for text in filter(None, (grammar.after, grammar.opener)):
            token = self._tokenizer.raw.token_to_id(text)
            if token is None and grammar.opener:
                return []
            if token is None:
                message = f"An answer can't follow a grammar after its reasoning: this model has no token {text!r}."
                raise InvalidRequestError(grammar.field, message)
            found.append(token)
        return found


class AfterToken:
    """The constraint ``made`` of the text after a token, such as ``</think>``: before it, all but an end is allowed.

    ``tokens`` are the token and, if there may be no text before it, the token that begins this text.
    """

    def __init__(self, made: Constraint, tokens: Sequence[int], vocab_size: int, end_ids: Sequence[int]):
        self._made, self._after, self._opener = made, tokens[0], tokens[1] if len(tokens) > 1 else None
        self._state = "before" if self._opener is None else "start"
        self._free = ~_bits(end_ids, vocab_size) & _bits(range(vocab_size), vocab_size)
        self._opening = _bits(tokens[1:], vocab_size)

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

    def forced(self, count: int) -> Sequence[int]:
        return self._made.forced(count) if self._state == "made" else ()

    def allowed(self, drafts: Sequence[int]) -> int:
        for count, (mask, draft) in enumerate(zip(self.masks(drafts), drafts, strict=False)):
            if not mask[draft // 32] >> draft % 32 & 1:
                return count
        return len(drafts)

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


def _bits(tokens: Sequence[int], vocab_size: int) -> I32:
    """Return the mask that allows ``tokens``: int32 ``[ceil(vocab_size / 32)]``."""
    bits = np.zeros(-(-vocab_size // 32) * 32, bool)
    bits[list(tokens)] = True
    return np.packbits(bits, bitorder="little").view(np.int32)
