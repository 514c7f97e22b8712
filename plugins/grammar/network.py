"""Grammars as networks of nodes whose edges read bytes.

A network is a nondeterministic automaton with calls: an edge reads one byte, or nothing, or calls a rule, which is a
network of its own. So rules may be recursive, as JSON is: Woods, Transition Network Grammars for Natural Language
Analysis, 1970. `minisgl.plugins.grammar.automaton` makes it deterministic, by the subset construction.
"""

from __future__ import annotations

from collections.abc import Callable

Expression = Callable[["Network", int], int]
"""A part of a grammar: ``expression(network, start)`` adds it at the node ``start`` and returns its last node."""

MAX_NODES = 200_000
"""The largest number of nodes and edges of a grammar, and of repetitions while it is built."""


class GrammarTooLargeError(ValueError):
    """A grammar has too many nodes or states, or a rule begins with itself."""


class Network:
    """The nodes and edges of a grammar, from node 0 to the node ``end``."""

    def __init__(self, grammar: Expression):
        self.reads: list[list[tuple[int, int, int]]] = []  # node → (first byte, last byte, next node)
        self.skips: list[list[int]] = []  # node → nodes that are reached without a byte
        self.calls: list[list[tuple[str, int]]] = []  # node → (rule, the node after it)
        self.rules: dict[str, tuple[int, int]] = {}  # name → first and last node
        self._size = 0
        self.end = grammar(self, self.node())

    def node(self) -> int:
        """Return a new node."""
        self.count()
        self.reads.append([])
        self.skips.append([])
        self.calls.append([])
        return len(self.reads) - 1

    def read(self, start: int, first: int, last: int, end: int) -> None:
        """Add an edge that reads one byte from ``first`` to ``last``."""
        self.count()
        self.reads[start].append((first, last, end))

    def skip(self, start: int, end: int) -> int:
        """Add an edge that reads nothing. Return ``end``."""
        self.count()
        self.skips[start].append(end)
        return end

    def call(self, start: int, name: str, body: Expression) -> int:
        """Add an edge that reads what the rule ``name`` reads, which is ``body``. Return the node after it."""
        if name not in self.rules:
            first, last = self.node(), self.node()
            self.rules[name] = first, last  # the body may call the rule
            self.skip(body(self, first), last)
        after = self.node()
        self.calls[start].append((name, after))
        return after

    def count(self) -> None:
        """Count a node, an edge or a repetition. Raise `GrammarTooLargeError` if there are too many."""
        self._size += 1
        if self._size > MAX_NODES:
            raise GrammarTooLargeError(f"The grammar is too large: it has more than {MAX_NODES} nodes and edges.")


# ---- expressions -----------------------------------------------------------------------------------------


def byte(first: int, last: int) -> Expression:
    """Return one byte from ``first`` to ``last``."""

    def add(network: Network, start: int) -> int:
        end = network.node()
        network.read(start, first, last, end)
        return end

    return add


def literal(text: bytes) -> Expression:
    """Return exactly these bytes."""
    return sequence(*(byte(each, each) for each in text))


def sequence(*parts: Expression) -> Expression:
    """Return the parts one after another."""

    def add(network: Network, start: int) -> int:
        for part in parts:
            start = part(network, start)
        return start

    return add


def choice(*parts: Expression) -> Expression:
    """Return one of the parts."""

    def add(network: Network, start: int) -> int:
        end = network.node()
        for part in parts:
            network.skip(part(network, start), end)
        return end

    return add


def repeat(part: Expression, least: int = 0, most: int | None = None) -> Expression:
    """Return ``part`` from ``least`` to ``most`` times; None: any number of times."""

    def add(network: Network, start: int) -> int:
        for _ in range(least):
            network.count()
            start = part(network, start)
        if most is None:
            loop = network.skip(start, network.node())
            network.skip(part(network, loop), loop)
            return loop
        end = network.node()
        network.skip(start, end)
        for _ in range(most - least):
            network.count()
            start = part(network, start)
            network.skip(start, end)
        return end

    return add


def rule(name: str, body: Expression) -> Expression:
    """Return a call of the rule ``name``: wherever it is used, its nodes exist once."""
    return lambda network, start: network.call(start, name, body)
