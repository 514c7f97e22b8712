"""Lab grammar: An answer that a program can read.

Grade it:  python -m minisgl.lab test grammar     (`hint grammar` for a hint)
Serve it:  python -m minisgl plugins=my_grammar.py grammar=mine
"""

# minisgl lab grammar, skeleton 5ae20c620c (minisgl 0.2.0)

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
class Mine:
    """The grammars of ``plain``, in the smallest code, for small vocabularies."""

    max_work: int = 400_000
    """Largest number of places that are read for one mask. A request whose grammar needs more ends with an error."""

    def __post_init__(self) -> None:
        if self.max_work < 1:
            raise ValueError(f"grammar.max_work={self.max_work} must be at least 1.")

    def build(self, tokenizer: Tokenizer) -> MyGrammars:
        return MyGrammars(tokenizer, self.max_work)


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

    def prepare(self) -> None:
        """Compute what the other methods need of the network, once."""
        # TODO grammar.states
        # 1. Nothing has to be computed here. The third promise of `after` may be easier to keep with what you find now.
        raise NotImplementedError

    def start(self) -> State:
        """Return the state of the empty text: empty if the grammar allows no text at all."""
        # TODO grammar.states
        raise NotImplementedError

    def after(self, state: State, byte: int) -> State:
        """Return the state after one more byte. The given state does not change."""
        # TODO grammar.states
        # 2. The state has every place that the text can have reached, and no other: a rule that ends goes on where it
        #    was called, and nowhere else.
        # 3. No dead ends: a state is empty unless a text of the grammar goes on from it to an end.
        # 4. Every call returns. Edges that read nothing may form a circle. A rule that begins with itself has places
        #    without end: raise GrammarTooLargeError for more than MAX_PLACES.
        # 5. Equal texts have equal states, and a state is hashable.
        raise NotImplementedError

    def is_final(self, state: State) -> bool:
        """Return whether a text of the grammar may end here."""
        # TODO grammar.states
        # 6. It may also go on here.
        raise NotImplementedError

    def _closed(self, places: Iterable[Place]) -> State:
        # TODO grammar.states
        raise NotImplementedError


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

    def prepare(self) -> None:
        """Compute what `mask` needs of the vocabulary, once."""
        # TODO grammar.mask
        # 1. This may take as long as all bytes of all tokens.
        raise NotImplementedError

    def mask(self, state: State) -> I32:
        """Return the tokens that may follow in a state: int32 ``[ceil(size / 32)]``, as of `pack_mask`."""
        # TODO grammar.mask
        # 2. A token may follow if a text of the grammar goes on with all of its bytes. An end token may follow where
        #    the text may end.
        # 3. A real vocabulary has 150,000 tokens, and most of them begin with bytes that no text goes on with. The work
        #    must not grow with their number. Bytes with which several tokens begin are read once for all of them.
        # 4. A client may send any grammar. Raise GrammarTooLargeError where the states from which bytes are read for a
        #    mask have more than `max_work` places together. A state counts once for each byte that is tried from it.
        # 5. The mask of a state is computed once, but not more than KEPT_MASKS masks are kept.
        raise NotImplementedError

    def _computed(self, state: State) -> I32:
        # TODO grammar.mask
        raise NotImplementedError


class MyMatcher(Matcher):
    """One answer. ``state`` is that of its text so far; many answers may use the same ``masks_of``."""

    def __init__(self, masks_of: Masks):
        self.masks_of = masks_of
        self.state = masks_of.automaton.start()

    def read(self, text: str) -> bool:
        for byte in text.encode():
            self.state = self.masks_of.automaton.after(self.state, byte)
        return bool(self.state)

    def advance(self, tokens: Sequence[int]) -> None:
        """Go on with sampled tokens: one, or several after drafts were accepted."""
        # TODO grammar.answer
        # 1. After an end token, and after a token that was not allowed, no token may follow.
        raise NotImplementedError

    def masks(self, drafts: Sequence[int]) -> I32:
        """Return the masks for the next token, and for the token after each draft: int32 ``[1 + drafts, words]``."""
        # TODO grammar.answer
        # 2. The drafts are guesses: the answer has not gone on. Any of them may be a token that is not allowed.
        # 3. The caller may write into the result.
        raise NotImplementedError

    def _after(self, state: State, token: int) -> State:
        # TODO grammar.answer
        raise NotImplementedError


class MyGrammars(Grammars):
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

    def _matcher(self, grammar: Grammar, vocab_size: int, end_ids: Sequence[int]) -> MyMatcher:
        if not self.tokens:
            self.tokens = bytes_to_read(self.tokenizer, vocab_size)
        masks = self.shared.pop(grammar, None)
        if masks is None:
            masks = Masks(self._automaton(grammar), self.tokens, vocab_size, end_ids, self.max_work)
        self.shared[grammar] = masks
        if len(self.shared) > KEPT_GRAMMARS:
            self.shared.popitem(last=False)
        return MyMatcher(masks)


@hookimpl
def minisgl_configs() -> Iterator[tuple[str, str, type]]:
    """Register the options of this plugin."""
    yield "grammar", "mine", Mine
