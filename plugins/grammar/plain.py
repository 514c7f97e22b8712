"""`grammar=plain`: masks by an automaton over bytes and a tree of the tokenizer's vocabulary, in plain Python."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from minisgl.hooks import hookimpl
from minisgl.plugins.grammar.base import (
    Grammars,
    Matcher,
    masks_with_rollback,
    read_choices,
    read_json,
    refuse,
    token_bytes,
)
from minisgl.plugins.grammar.characters import utf8
from minisgl.plugins.grammar.network import DEAD, START, Automaton, GrammarTooLargeError, Network, choice, literal
from minisgl.plugins.grammar.regex import RegexError, parse
from minisgl.plugins.grammar.schema import SchemaError, grammar_of, strict
from minisgl.plugins.grammar.vocabulary import Vocabulary, pack
from minisgl.sampling_params import Grammar

if TYPE_CHECKING:
    from minisgl.tokenizer import Tokenizer

I32 = npt.NDArray[np.int32]
MASK_BYTES = 64 << 20
"""The largest size of the masks that are kept for all grammars."""
KEPT_GRAMMARS = 64
"""The number of compiled grammars that are kept."""


@dataclass
class Plain:
    """Choices, regular expressions, and the JSON schemas whose keywords `minisgl.plugins.grammar.schema` names."""

    def build(self, tokenizer: Tokenizer) -> PlainGrammars:
        return PlainGrammars(tokenizer)


def network_of(grammar: Grammar) -> Network:
    """Return a grammar as a network. Raise `InvalidRequestError` if it is wrong or not supported."""
    try:
        match grammar.kind:
            case "json_schema":
                return Network(grammar_of(strict(read_json(grammar))))
            case "regex":
                return Network(parse(grammar.text, utf8, anchored=True))
            case "choice":
                return Network(choice(*(literal(text.encode()) for text in read_choices(grammar))))
    except (RegexError, SchemaError, GrammarTooLargeError, RecursionError) as error:
        raise refuse(grammar, error) from None
    raise refuse(grammar, f"grammar=plain can't read grammars of the kind {grammar.kind}: use grammar=llguidance.")


class PlainGrammars(Grammars):
    """The compiled grammars and the masks of their states. Equal grammars share them."""

    def __init__(self, tokenizer: Tokenizer):
        super().__init__(tokenizer)
        self._vocabulary: Vocabulary | None = None
        self._automata: OrderedDict[Grammar, Automaton] = OrderedDict()
        self._masks: OrderedDict[tuple[Automaton, int], I32] = OrderedDict()

    def check(self, grammar: Grammar) -> None:
        try:
            Automaton(network_of(grammar))
        except GrammarTooLargeError as error:
            raise refuse(grammar, error) from None

    def _matcher(self, grammar: Grammar, vocab_size: int, end_ids: Sequence[int]) -> Matcher:
        if self._vocabulary is None:
            self._vocabulary = Vocabulary(token_bytes(self.tokenizer, vocab_size), vocab_size)
        automaton = self._automata.get(grammar)
        if automaton is None:
            automaton = self._automata[grammar] = Automaton(network_of(grammar))
            if len(self._automata) > KEPT_GRAMMARS:
                self._automata.popitem(last=False)
        self._automata.move_to_end(grammar)
        return PlainMatcher(self, automaton, self._vocabulary, end_ids)

    def mask(self, automaton: Automaton, state: int, vocabulary: Vocabulary, end_ids: Sequence[int]) -> I32:
        """Return the mask of a state: int32 ``[ceil(tokens / 32)]``."""
        key = automaton, state
        found = self._masks.get(key)
        if found is None:
            always = end_ids if automaton.is_final(state) else ()
            found = self._masks[key] = pack(vocabulary.allowed(automaton, state, always))
            while len(self._masks) * found.nbytes > MASK_BYTES:
                self._masks.popitem(last=False)
        self._masks.move_to_end(key)
        return found


class PlainMatcher:
    """One answer: the state of its grammar's automaton."""

    def __init__(self, grammars: PlainGrammars, automaton: Automaton, vocabulary: Vocabulary, end_ids: Sequence[int]):
        self._grammars, self._automaton, self._vocabulary = grammars, automaton, vocabulary
        self._end_ids = end_ids
        self._states = [START]  # after each draft, while `masks` tries them

    def advance(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            if token not in self._end_ids and not self._consume(token):
                self._states.append(DEAD)
        del self._states[:-1]

    def _consume(self, token: int) -> bool:
        text = self._vocabulary.tokens[token]
        state = self._automaton.walk(self._states[-1], text) if text else DEAD
        if state == DEAD:
            return False
        self._states.append(state)
        return True

    def masks(self, drafts: Sequence[int]) -> I32:
        def mask() -> I32:
            return self._grammars.mask(self._automaton, self._states[-1], self._vocabulary, self._end_ids)

        def roll_back(count: int) -> None:
            del self._states[-count:]

        try:
            return masks_with_rollback(drafts, mask, self._consume, roll_back)
        except GrammarTooLargeError:
            return np.zeros((1 + len(drafts), -(-self._vocabulary.size // 32)), np.int32)


@hookimpl
def minisgl_configs() -> Any:
    yield "grammar", "plain", Plain
