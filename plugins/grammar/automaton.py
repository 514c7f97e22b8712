"""The deterministic automaton of a grammar's network, whose states are computed while it is used."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from minisgl.plugins.grammar.network import GrammarTooLargeError, Network

DEAD, START = 0, 1
"""The state from which no text leads to an end, and the first state."""
MAX_STATES = 20_000
"""The largest number of states of an automaton, each of which has a row of 1 KiB."""
MAX_PAIRS = 5_000
"""The largest number of pairs of a node and a stack in one state."""
MAX_WORK = 400_000
"""The largest number of places and edges that are read between two calls of `Automaton.begin`: under a second."""


class Automaton:
    """The states of a network, numbered in the order in which they are first reached.

    A state is the set of all places in the network at which a text may be. A place is a node and a stack: the nodes at
    which the called rules go on. ``table`` int32 ``[states, 256]`` has the next state for each byte, `DEAD` if no text
    of the grammar goes on with it; a row is valid after `expand`.
    """

    def __init__(self, network: Network):
        self.network = network
        self._ends = {last for _, last in network.rules.values()}
        self._stacks: list[tuple[int, int]] = [(-1, -1)]  # stack → (node of its top, stack below); 0 is empty
        self._stack_ids: dict[tuple[int, int], int] = {}
        self._places: list[frozenset[tuple[int, int]]] = [frozenset()]
        self._states: dict[frozenset[tuple[int, int]], int] = {frozenset(): DEAD}
        self._next: dict[frozenset[tuple[int, int]], int] = {}  # places without those reached from them → state
        self._expanded = np.zeros(64, bool)
        self._expanded[DEAD] = True
        self.table = np.zeros((64, 256), np.int32)
        self._work = 0
        self._state([(0, 0)])

    @property
    def is_full(self) -> bool:
        """Whether half of all states are in use, so that the next question should go to a new automaton: `adopt`."""
        return len(self._places) > MAX_STATES // 2

    def adopt(self, other: Automaton, state: int) -> int:
        """Return the state that is equal to ``state`` of another automaton of the same network."""
        places = []
        for node, stack in other._places[state]:
            nodes, adopted = [], 0
            while stack:
                top, stack = other._stacks[stack]
                nodes.append(top)
            for each in reversed(nodes):
                adopted = self._push(each, adopted)
            places.append((node, adopted))
        return self._state(places)

    def begin(self) -> None:
        """Begin to count the work for one question, such as a mask."""
        self._work = 0

    def _count(self, work: int) -> None:
        self._work += work
        if self._work > MAX_WORK:
            raise GrammarTooLargeError("The grammar is too ambiguous: it takes too long to find what may follow.")

    def is_final(self, state: int) -> bool:
        """Return whether a text of the grammar may end here."""
        return (self.network.end, 0) in self._places[state]

    def is_dead_end(self, state: int) -> bool:
        """Return whether no byte may follow."""
        self.expand([state])
        return not self.table[state].any()

    def forced_text(self, state: int, most: int) -> tuple[bytes, int]:
        """Return the text that must follow, of at most ``most`` bytes, and the state after it."""
        text = bytearray()
        while len(text) < most and not self.is_final(state):
            self.expand([state])
            following = np.flatnonzero(self.table[state])
            if len(following) != 1:
                break
            text.append(int(following[0]))
            state = int(self.table[state, text[-1]])
        return bytes(text), state

    def walk(self, state: int, text: bytes) -> int:
        """Return the state after ``text``."""
        for each in text:
            self.expand([state])
            state = int(self.table[state, each])
        return state

    def expand(self, states: Sequence[int] | npt.NDArray[np.int32]) -> None:
        """Compute the rows of ``states`` in the table."""
        for state in np.unique(states).tolist():
            if not self._expanded[state]:
                self._expand(state)
                self._expanded[state] = True

    def _expand(self, state: int) -> None:
        reads = self.network.reads
        edges = [(first, last, end, stack) for node, stack in self._places[state] for first, last, end in reads[node]]
        borders = sorted({border for first, last, _, _ in edges for border in (first, last + 1)})
        self._count(len(self._places[state]) + len(edges) * len(borders) // 4)
        for low, high in itertools.pairwise(borders):
            reached = frozenset((end, stack) for first, last, end, stack in edges if first <= low and high - 1 <= last)
            if reached:
                target = self._next.get(reached)
                if target is None:
                    target = self._next[reached] = self._state(reached)
                self.table[state, low:high] = target

    def _state(self, places: Iterable[tuple[int, int]]) -> int:
        """Return the number of the state with ``places`` and all that are reached from them without a byte."""
        network, todo = self.network, list(places)
        found = set(todo)
        while todo:
            node, stack = todo.pop()
            reached = [(end, stack) for end in network.skips[node]]
            reached += [(network.rules[name][0], self._push(after, stack)) for name, after in network.calls[node]]
            if node in self._ends:
                reached.append(self._stacks[stack])
            for place in reached:
                if place not in found:
                    found.add(place)
                    todo.append(place)
            self._count(1)
            if len(found) > MAX_PAIRS:
                raise GrammarTooLargeError("The grammar is too ambiguous, or one of its rules begins with itself.")
        kept = frozenset(p for p in found if network.reads[p[0]] or p == (network.end, 0))
        state = self._states.get(kept)
        if state is None:
            state = len(self._places)
            if state == MAX_STATES:
                raise GrammarTooLargeError(f"The grammar has more than {MAX_STATES} states.")
            self._states[kept] = state
            self._places.append(kept)
            if state == len(self.table):
                self.table = np.concatenate((self.table, np.zeros_like(self.table)))
                self._expanded = np.concatenate((self._expanded, np.zeros_like(self._expanded)))
        return state

    def _push(self, node: int, stack: int) -> int:
        number = self._stack_ids.get((node, stack))
        if number is None:
            number = self._stack_ids[node, stack] = len(self._stacks)
            self._stacks.append((node, stack))
        return number
