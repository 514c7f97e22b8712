"""`grammar=plain`: masks by an automaton over bytes and a tree of the tokenizer's vocabulary, in plain Python."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from minisgl.core import I32
from minisgl.hooks import hookimpl
from minisgl.plugins.constraint.base import pack_mask
from minisgl.plugins.grammar.automaton import DEAD, START, Automaton
from minisgl.plugins.grammar.base import Grammars, Matcher, bytes_to_read, masks_with_rollback, refuse
from minisgl.plugins.grammar.languages import network_of
from minisgl.plugins.grammar.network import GrammarTooLargeError, Network
from minisgl.plugins.grammar.vocabulary import Vocabulary
from minisgl.sampling_params import Grammar

if TYPE_CHECKING:
    from minisgl.tokenizer import Tokenizer

TOO_LARGE = -1
"""The state of an answer whose grammar grew too large."""
MASK_BYTES = 16 << 20
"""The largest size of the masks that are kept for one grammar."""
KEPT_BYTES = 256 << 20
"""The largest size of all compiled grammars that are kept for further requests."""
MAX_FORCED = 256
"""The largest number of bytes of a certain text that are looked up at once."""


@dataclass
class Plain:
    """Choices, regular expressions, and the JSON schemas whose keywords `minisgl.plugins.grammar.schema` names."""

    def build(self, tokenizer: Tokenizer) -> PlainGrammars:
        return PlainGrammars(tokenizer)


class Compiled:
    """A compiled grammar, with what was computed of its states: masks, and tokens of certain texts.

    Equal grammars share it. A state's mask is int32 ``[ceil(tokens / 32)]``; the tokens ``end_ids`` end an answer.
    """

    def __init__(self, network: Network, vocabulary: Vocabulary, end_ids: Sequence[int], tokenizer: Tokenizer):
        self.automaton, self.vocabulary, self.end_ids = Automaton(network), vocabulary, end_ids
        self._tokenizer = tokenizer
        self._masks: OrderedDict[int, I32] = OrderedDict()
        self._forced: dict[int, list[int]] = {}

    @property
    def nbytes(self) -> int:
        """The size of the larger arrays."""
        return self.automaton.table.nbytes + len(self._masks) * self.vocabulary.size // 8

    def renewed(self, automaton: Automaton, state: int) -> tuple[Automaton, int]:
        """Return the automaton to go on with, and its state that is equal to ``state`` of ``automaton``.

        A full automaton is replaced by a new one. Otherwise the answers of all requests with an equal grammar would
        fill it, and from then on each of them would end with an error.
        """
        if automaton is self.automaton and automaton.is_full:
            self.automaton = Automaton(automaton.network)
            self._masks.clear()
            self._forced.clear()
        if automaton is not self.automaton and state >= 0:
            self.automaton.begin()
            state = self.automaton.adopt(automaton, state)
        return self.automaton, state

    def after(self, state: int, token: int) -> int:
        """Return the state after a token: `DEAD` if the grammar does not allow it, `TOO_LARGE` if it grew too large."""
        text = self.vocabulary.tokens[token]
        self.automaton.begin()
        try:
            return self.automaton.walk(state, text) if text and state >= 0 and token not in self.end_ids else DEAD
        except GrammarTooLargeError:
            return TOO_LARGE

    def mask(self, state: int) -> I32:
        """Return the mask of a state, which forbids all tokens if the grammar grew too large."""
        if state == TOO_LARGE:
            return pack_mask(np.zeros(self.vocabulary.size, bool))
        found = self._masks.get(state)
        if found is None:
            self.automaton.begin()
            try:
                always = self.end_ids if self.automaton.is_final(state) else ()
                found = pack_mask(self.vocabulary.allowed(self.automaton, state, always))
            except GrammarTooLargeError:
                return pack_mask(np.zeros(self.vocabulary.size, bool))
            self._masks[state] = found
            while len(self._masks) * found.nbytes > MASK_BYTES:
                self._masks.popitem(last=False)
        self._masks.move_to_end(state)
        return found

    def forced(self, state: int) -> list[int]:
        """Return the tokens of the text that must follow, without the last one if later text may change it."""
        if state == TOO_LARGE:
            return []
        if state not in self._forced:
            self.automaton.begin()
            try:
                self._forced[state] = self._tokens_of(*self.automaton.forced_text(state, MAX_FORCED))
            except GrammarTooLargeError:
                self._forced[state] = []
        return self._forced[state]

    def _tokens_of(self, text: bytes, end: int) -> list[int]:
        whole = text[: utf8_length(text)]
        tokens = self._tokenizer.encode(whole.decode(), add_special_tokens=False)
        if whole == text and self.automaton.is_dead_end(end):
            return [*tokens, *self.end_ids[:1]]
        return tokens[:-1]


class PlainGrammars(Grammars):
    """The compiled grammars, of which those used last are kept."""

    def __init__(self, tokenizer: Tokenizer):
        super().__init__(tokenizer)
        self._vocabulary: Vocabulary | None = None
        self._kept: OrderedDict[Grammar, Compiled] = OrderedDict()

    def _check(self, grammar: Grammar) -> None:
        try:
            Automaton(network_of(grammar, self.special_tokens)).expand([START])
        except GrammarTooLargeError as error:
            raise refuse(grammar, error) from None

    def _allows_prefix(self, grammar: Grammar) -> bool:
        return begun(network_of(grammar, self.special_tokens), grammar.prefix)[1] > DEAD

    def _matcher(self, grammar: Grammar, vocab_size: int, end_ids: Sequence[int]) -> PlainMatcher:
        if self._vocabulary is None:
            self._vocabulary = Vocabulary(bytes_to_read(self.tokenizer, vocab_size), vocab_size)
        compiled = self._kept.pop(grammar, None)
        if compiled is None:
            compiled = Compiled(network_of(grammar, self.special_tokens), self._vocabulary, end_ids, self.tokenizer)
        self._kept[grammar] = compiled
        while len(self._kept) > 1 and sum(each.nbytes for each in self._kept.values()) > KEPT_BYTES:
            self._kept.popitem(last=False)
        return PlainMatcher(compiled)


class PlainMatcher(Matcher):
    """One answer: the state of its grammar's automaton."""

    def __init__(self, compiled: Compiled):
        self._compiled, self._automaton = compiled, compiled.automaton
        self._state = START

    def _renew(self) -> None:
        self._automaton, self._state = self._compiled.renewed(self._automaton, self._state)

    def advance(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._renew()
            self._state = self._compiled.after(self._state, token)

    def read(self, text: str) -> bool:
        self._automaton, self._state = begun(self._compiled.automaton.network, text)
        return self._state > DEAD

    def masks(self, drafts: Sequence[int]) -> I32:
        self._renew()
        states = [self._state]

        def mask() -> I32:
            return self._compiled.mask(states[-1])

        def consume(token: int) -> bool:
            state = self._compiled.after(states[-1], token)
            if state != DEAD:
                states.append(state)
            return state != DEAD

        def roll_back(count: int) -> None:
            del states[-count:]

        return masks_with_rollback(drafts, mask, consume, roll_back)

    def allowed(self, drafts: Sequence[int]) -> int:
        self._renew()
        state = self._state
        for count, draft in enumerate(drafts):
            if draft in self._compiled.end_ids:
                return count + self._compiled.automaton.is_final(state)
            state = self._compiled.after(state, draft)
            if state == DEAD:
                return count
        return len(drafts)

    def forced(self, count: int) -> Sequence[int]:
        self._renew()
        return self._compiled.forced(self._state)[:count]


def begun(network: Network, text: str) -> tuple[Automaton, int]:
    """Return a new automaton that has read ``text``, the beginning of an answer, and its state after it."""
    automaton = Automaton(network)
    automaton.begin()
    try:
        return automaton, automaton.walk(START, text.encode())
    except GrammarTooLargeError:
        return automaton, TOO_LARGE


def utf8_length(text: bytes) -> int:
    """Return how many bytes at the beginning of ``text`` are whole characters."""
    try:
        text.decode()
    except UnicodeDecodeError as error:
        return error.start
    return len(text)


@hookimpl
def minisgl_configs() -> Any:
    yield "grammar", "plain", Plain
