"""`grammar=subset`: masks by the subset construction and one walk through the vocabulary, in one short file.

It reads the grammars of `grammar=plain`. That one computes with arrays, so it also serves vocabularies of 150,000
tokens; this one is for small ones, such as that of `tutor`. It leaves out the texts that no end of the grammar follows,
such as those of a rule that can only call itself.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from minisgl.core import I32
from minisgl.hooks import hookimpl
from minisgl.plugins.constraint.base import pack_mask
from minisgl.plugins.grammar.base import Grammars, Matcher, bytes_to_read, refuse
from minisgl.plugins.grammar.languages import network_of
from minisgl.plugins.grammar.network import GrammarTooLargeError, Network
from minisgl.sampling_params import Grammar

if TYPE_CHECKING:
    from minisgl.tokenizer import Tokenizer

MAX_PLACES = 2_000
"""The largest number of places in one state."""
KEPT_MASKS = 256
"""The largest number of masks that are kept for one grammar."""
KEPT_GRAMMARS = 16
"""The largest number of grammars that are kept for further requests."""

Place = tuple[int, tuple[int, ...]]
"""A node of the network, and the nodes at which the rules that were called go on, the latest call first."""
State = frozenset[Place]
"""All places at which a text may be. The empty state is that of a text with which no text of the grammar begins."""


@dataclass
class Subset:
    """The grammars of ``plain``, in the smallest code, for small vocabularies."""

    max_work: int = 400_000
    """Largest number of places that are read for one mask. A request whose grammar needs more ends with an error."""

    def __post_init__(self) -> None:
        if self.max_work < 1:
            raise ValueError(f"grammar.max_work={self.max_work} must be at least 1.")

    def build(self, tokenizer: Tokenizer) -> SubsetGrammars:
        return SubsetGrammars(tokenizer, self.max_work)


class Automaton:
    """The states of a network. ``network.reads[node]``, ``skips[node]`` and ``calls[node]`` are its edges.

    An edge in ``reads`` is (first byte, last byte, next node), and reads one byte from first to last. An edge in
    ``skips`` is a next node, and reads nothing. An edge in ``calls`` is (rule, next node): it reads a text of the rule,
    whose nodes are those from the first to the last one in ``network.rules[rule]``. A text of the grammar begins at
    node 0, and is whole at ``network.end``.
    """

    def __init__(self, network: Network):
        self.network = network
        self.prepare()

    # lab: grammar.states
    def prepare(self) -> None:
        """Compute what the other methods need of the network, once."""
        # 1. Nothing has to be computed here. The third promise of `after` may be easier to keep with what you find now.
        network = self.network
        self._ends = {last for _, last in network.rules.values()}
        before: list[list[int]] = [[] for _ in network.reads]  # node -> nodes with an edge to it
        callers: dict[int, list[tuple[int, int]]] = {}  # first node of a rule -> (node that calls it, node after it)
        for node in range(len(network.reads)):
            for end in (*(end for _, _, end in network.reads[node]), *network.skips[node]):
                before[end].append(node)
            for name, after in network.calls[node]:
                callers.setdefault(network.rules[name][0], []).append((node, after))
                callers.setdefault(after, []).append((node, network.rules[name][0]))
        self._useful = {network.end, *self._ends}  # nodes from which the end of their rule can be reached
        todo = list(self._useful)
        while todo:
            node = todo.pop()
            reached = [*before[node], *(caller for caller, other in callers.get(node, ()) if other in self._useful)]
            todo += [each for each in reached if each not in self._useful]
            self._useful.update(reached)

    def start(self) -> State:
        """Return the state of the empty text: empty if the grammar allows no text at all."""
        return self._closed([(0, ())])

    def after(self, state: State, byte: int) -> State:
        """Return the state after one more byte. The given state does not change."""
        # 2. The state has every place that the text can have reached, and no other: a rule that ends goes on where it
        #    was called, and nowhere else.
        # 3. No dead ends: a state is empty unless a text of the grammar goes on from it to an end.
        # 4. Every call returns. Edges that read nothing may form a circle. A rule that begins with itself has places
        #    without end: raise GrammarTooLargeError for more than MAX_PLACES.
        # 5. Equal texts have equal states, and a state is hashable.
        reads = self.network.reads
        return self._closed((end, s) for node, s in state for low, high, end in reads[node] if low <= byte <= high)

    def is_final(self, state: State) -> bool:
        """Return whether a text of the grammar may end here."""
        # 6. It may also go on here.
        return (self.network.end, ()) in state

    def _closed(self, places: Iterable[Place]) -> State:
        network, useful = self.network, self._useful
        found: set[Place] = set()
        todo = list(places)
        while todo:
            place = node, stack = todo.pop()
            if place in found or node not in useful:
                continue
            found.add(place)
            if len(found) > MAX_PLACES:
                raise GrammarTooLargeError("The grammar is too ambiguous, or one of its rules begins with itself.")
            todo += [(end, stack) for end in network.skips[node]]
            for name, after in network.calls[node]:
                if after in useful:
                    todo.append((network.rules[name][0], (after, *stack)))
            if node in self._ends:
                todo.append((stack[0], stack[1:]))
        return frozenset(place for place in found if network.reads[place[0]] or place == (network.end, ()))

    # lab: end


class Masks:
    """The masks of one grammar's states, for all requests with this grammar.

    ``tokens[t]`` are the bytes of token t, none for a token that no grammar allows. A mask has ``size`` tokens, which
    may be more than ``tokens``. The tokens ``end_ids`` end an answer, whatever their bytes are.
    """

    def __init__(self, automaton: Automaton, tokens: Sequence[bytes], size: int, end_ids: Sequence[int], max_work: int):
        self.automaton, self.tokens, self.size, self.end_ids = automaton, tokens, size, end_ids
        self.max_work = max_work
        self.kept: OrderedDict[State, I32] = OrderedDict()
        self.prepare()

    # lab: grammar.mask
    def prepare(self) -> None:
        """Compute what `mask` needs of the vocabulary, once."""
        # 1. This may take as long as all bytes of all tokens.
        self._children: list[dict[int, int]] = [{}]  # node of the tree -> byte -> node
        self._tokens: list[list[int]] = [[]]  # node -> tokens whose bytes lead there
        for token, text in enumerate(self.tokens[: self.size]):
            node = 0
            for byte in text:
                child = self._children[node].setdefault(byte, len(self._children))
                if child == len(self._children):
                    self._children.append({})
                    self._tokens.append([])
                node = child
            if text and token not in self.end_ids:
                self._tokens[node].append(token)

    def mask(self, state: State) -> I32:
        """Return the tokens that may follow in a state: int32 ``[ceil(size / 32)]``, as of `pack_mask`."""
        # 2. A token may follow if a text of the grammar goes on with all of its bytes. An end token may follow where
        #    the text may end.
        # 3. A real vocabulary has 150,000 tokens, and most of them begin with bytes that no text goes on with. The work
        #    must not grow with their number. Bytes with which several tokens begin are read once for all of them.
        # 4. A client may send any grammar. Raise GrammarTooLargeError where the states from which bytes are read for a
        #    mask have more than `max_work` places together. A state counts once for each byte that is tried from it.
        # 5. The mask of a state is computed once, but not more than KEPT_MASKS masks are kept.
        found = self.kept.get(state)
        if found is None:
            found = self.kept[state] = self._computed(state)
            if len(self.kept) > KEPT_MASKS:
                self.kept.popitem(last=False)
        self.kept.move_to_end(state)
        return found

    def _computed(self, state: State) -> I32:
        allowed = np.zeros(self.size, bool)
        if self.automaton.is_final(state):
            allowed[[token for token in self.end_ids if token < self.size]] = True
        todo, work = [(0, state)], 0
        while todo:
            node, at = todo.pop()
            work += len(at) * len(self._children[node])
            if work > self.max_work:
                raise GrammarTooLargeError("The grammar is too ambiguous: it takes too long to find what may follow.")
            for byte, child in self._children[node].items():
                after = self.automaton.after(at, byte)
                if after:
                    allowed[self._tokens[child]] = True
                    todo.append((child, after))
        return pack_mask(allowed)

    # lab: end


class SubsetMatcher(Matcher):
    """One answer. ``state`` is that of its text so far; many answers may use the same ``masks_of``."""

    def __init__(self, masks_of: Masks):
        self.masks_of = masks_of
        self.state = masks_of.automaton.start()

    def read(self, text: str) -> bool:
        for byte in text.encode():
            self.state = self.masks_of.automaton.after(self.state, byte)
        return bool(self.state)

    # lab: grammar.answer
    def advance(self, tokens: Sequence[int]) -> None:
        """Go on with sampled tokens: one, or several after drafts were accepted."""
        # 1. After an end token, and after a token that was not allowed, no token may follow.
        for token in tokens:
            self.state = self._after(self.state, token)

    def masks(self, drafts: Sequence[int]) -> I32:
        """Return the masks for the next token, and for the token after each draft: int32 ``[1 + drafts, words]``."""
        # 2. The drafts are guesses: the answer has not gone on. Any of them may be a token that is not allowed.
        # 3. The caller may write into the result.
        states = [self.state]
        for draft in drafts:
            states.append(self._after(states[-1], draft))
        return np.stack([self.masks_of.mask(state) for state in states])

    def _after(self, state: State, token: int) -> State:
        text = self.masks_of.tokens[token] if token < len(self.masks_of.tokens) else b""
        if not text or token in self.masks_of.end_ids:
            return frozenset()
        for byte in text:
            state = self.masks_of.automaton.after(state, byte)
        return state

    # lab: end


class SubsetGrammars(Grammars):
    """Makes the matchers of one scheduler. Equal grammars share their masks."""

    def __init__(self, tokenizer: Tokenizer, max_work: int):
        super().__init__(tokenizer)
        self.max_work = max_work
        self.tokens: list[bytes] = []
        self.shared: OrderedDict[Grammar, Masks] = OrderedDict()

    def _automaton(self, grammar: Grammar) -> Automaton:
        return Automaton(network_of(grammar, self.special_tokens))

    def _check(self, grammar: Grammar) -> None:
        try:
            if not self._automaton(grammar).start():
                raise refuse(grammar, "It allows no text.")
        except GrammarTooLargeError as error:
            raise refuse(grammar, error) from None

    def _allows_prefix(self, grammar: Grammar) -> bool:
        automaton = self._automaton(grammar)
        state = automaton.start()
        for byte in grammar.prefix.encode():
            state = automaton.after(state, byte)
        return bool(state)

    def _matcher(self, grammar: Grammar, vocab_size: int, end_ids: Sequence[int]) -> SubsetMatcher:
        if not self.tokens:
            self.tokens = bytes_to_read(self.tokenizer, vocab_size)
        masks = self.shared.pop(grammar, None)
        if masks is None:
            masks = Masks(self._automaton(grammar), self.tokens, vocab_size, end_ids, self.max_work)
        self.shared[grammar] = masks
        if len(self.shared) > KEPT_GRAMMARS:
            self.shared.popitem(last=False)
        return SubsetMatcher(masks)


@hookimpl
def minisgl_configs() -> Iterator[tuple[str, str, type]]:
    """Register the options of this plugin."""
    yield "grammar", "subset", Subset
