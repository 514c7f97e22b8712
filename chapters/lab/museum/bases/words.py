"""The masks of structured answers: which tokens of a vocabulary may follow, by one walk through their beginnings."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from minisgl.core import I32
from minisgl.hooks import hookimpl
from minisgl.plugins.constraint.base import pack_mask
from minisgl.plugins.grammar.automaton import DEAD, START, Automaton
from minisgl.plugins.grammar.base import Grammars, Matcher, bytes_to_read, refuse
from minisgl.plugins.grammar.languages import network_of
from minisgl.plugins.grammar.network import GrammarTooLargeError
from minisgl.sampling_params import Grammar

if TYPE_CHECKING:
    from minisgl.tokenizer import Tokenizer

KEPT = 256
"""The largest number of masks that are kept for one grammar."""


@dataclass
class Words:
    """Masks by one walk through the vocabulary, for small vocabularies."""

    def build(self, tokenizer: Tokenizer) -> WordGrammars:
        return WordGrammars(tokenizer)


class Vocabulary:
    """The beginnings of all tokens, as a tree. It is the same for all grammars.

    ``children[node]`` has the node after each byte, and ``tokens[node]`` the tokens whose bytes lead to the node.
    """

    def __init__(self, tokens: Sequence[bytes], size: int):
        self.texts, self.size = tokens, size
        self.children: list[dict[int, int]] = [{}]
        self.tokens: list[list[int]] = [[]]
        for token, text in enumerate(tokens[:size]):
            if text:
                self._add(token, text)

    def _add(self, token: int, text: bytes) -> None:
        """Add a token."""
        node = 0
        for byte in text:
            child = self.children[node].setdefault(byte, len(self.children))
            if child == len(self.children):
                self.children.append({})
                self.tokens.append([])
            node = child
        self.tokens[node].append(token)


class Masks:
    """The masks of one grammar's states. The tokens ``end_ids`` end an answer, whatever their bytes are."""

    def __init__(self, automaton: Automaton, vocabulary: Vocabulary, end_ids: Collection[int]):
        self.automaton, self.vocabulary = automaton, vocabulary
        self.end_ids = [token for token in end_ids if token < vocabulary.size]
        self.kept: OrderedDict[int, I32] = OrderedDict()
        self.walked = 0
        """Nodes of the vocabulary that were visited so far."""

    def mask(self, state: int) -> I32:
        """Return the tokens that may follow in a state: int32 [ceil(size / 32)]."""
        if state not in self.kept:
            self.kept[state] = pack_mask(self._allowed(state))
            if len(self.kept) > KEPT:
                self.kept.popitem(last=False)
        return self.kept[state]

    def _allowed(self, state: int) -> np.ndarray:
        """Return which tokens may follow: bool [size]."""
        allowed = np.zeros(self.vocabulary.size, bool)
        for node in self._reached(state):
            allowed[self.vocabulary.tokens[node]] = True
        allowed[self.end_ids] = self.automaton.is_final(state)
        return allowed

    def _reached(self, state: int) -> Iterator[int]:
        """Yield the nodes of the vocabulary whose bytes may follow."""
        self.automaton.begin()
        todo = [(0, state)]
        while todo:
            node, at = todo.pop()
            self.walked += 1
            yield node
            for byte, child in self.vocabulary.children[node].items():
                after = self.automaton.walk(at, bytes([byte]))
                if after != DEAD:
                    todo.append((child, after))


class WordMatcher(Matcher):
    """One answer. ``state`` is that of its text so far."""

    def __init__(self, masks_of: Masks):
        self.masks_of, self.state = masks_of, START

    def read(self, text: str) -> bool:
        self.state = self.masks_of.automaton.walk(self.state, text.encode())
        return self.state != DEAD

    def advance(self, tokens: Sequence[int]) -> None:
        """Go on with sampled tokens."""
        for token in tokens:
            self.state = self._after(self.state, token)

    def masks(self, drafts: Sequence[int]) -> I32:
        """Return the masks for the next token, and for the token after each draft: int32 [1 + drafts, words]."""
        states = [self.state]
        for draft in drafts:
            states.append(self._after(states[-1], draft))
        return np.stack([self.masks_of.mask(state) for state in states])

    def _after(self, state: int, token: int) -> int:
        """Return the state after a token. Nothing follows an end token."""
        texts = self.masks_of.vocabulary.texts
        text = texts[token] if token < len(texts) and token not in self.masks_of.end_ids else b""
        return self.masks_of.automaton.walk(state, text) if text else DEAD


class WordGrammars(Grammars):
    """Makes the matchers of one scheduler."""

    def __init__(self, tokenizer: Tokenizer):
        super().__init__(tokenizer)
        self.vocabulary: Vocabulary | None = None

    def _automaton(self, grammar: Grammar) -> Automaton:
        return Automaton(network_of(grammar, self.special_tokens))

    def _check(self, grammar: Grammar) -> None:
        try:
            self._automaton(grammar)
        except GrammarTooLargeError as error:
            raise refuse(grammar, error) from None

    def _allows_prefix(self, grammar: Grammar) -> bool:
        return self._automaton(grammar).walk(START, grammar.prefix.encode()) != DEAD

    def _matcher(self, grammar: Grammar, vocab_size: int, end_ids: Sequence[int]) -> WordMatcher:
        if self.vocabulary is None:
            self.vocabulary = Vocabulary(bytes_to_read(self.tokenizer, vocab_size), vocab_size)
        return WordMatcher(Masks(self._automaton(grammar), self.vocabulary, end_ids))


@hookimpl
def minisgl_configs() -> Iterator[tuple[str, str, type]]:
    """Register the options of this plugin."""
    yield "grammar", "museum", Words
