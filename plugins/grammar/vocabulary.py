"""The tokens of a tokenizer as a tree of bytes. One walk through it finds all tokens that a grammar allows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from minisgl.core import Bools
from minisgl.plugins.grammar.automaton import DEAD, Automaton


class Vocabulary:
    """The bytes of all tokens, as a tree: each node stands for the beginning of some tokens.

    ``tokens[t]`` are the bytes of token ``t``; a token without bytes is never allowed, such as a special token. A mask
    has ``size`` tokens, which may be more than the tokenizer has.
    """

    def __init__(self, tokens: Sequence[bytes], size: int):
        self.size, self.tokens = size, list(tokens[:size])
        ids = np.array([i for i, token in enumerate(self.tokens) if token], np.int64)
        ids = ids[np.argsort(np.array([self.tokens[i] for i in ids.tolist()], object), kind="stable")]
        lengths = np.array([len(self.tokens[i]) for i in ids.tolist()], np.int64)
        text = np.frombuffer(b"".join(self.tokens[i] for i in ids.tolist()), np.uint8)
        begins = np.cumsum(lengths) - lengths

        # Level by level: the tokens are sorted, so those with a common beginning are neighbours.
        node = np.zeros(len(ids), np.int64)  # the node of each token at the level; the root is node 0
        bytes_of, first_child, children = [np.zeros(1, np.uint8)], [], []
        self._ids, self._ends = ids, np.zeros(len(ids), np.int64)  # tokens, and the nodes at which they end
        count, level = 1, np.zeros(1, np.int64)
        for depth in range(int(lengths.max(initial=0))):
            rows = np.flatnonzero(lengths > depth)
            parent, value = node[rows], text[begins[rows] + depth]
            new = np.ones(len(rows), bool)
            new[1:] = (parent[1:] != parent[:-1]) | (value[1:] != value[:-1])
            node[rows] = count + np.cumsum(new) - 1
            born = np.bincount(parent[new] - level[0], minlength=len(level))
            first_child.append(count + np.cumsum(born) - born)
            children.append(born)
            bytes_of.append(value[new])
            ended = rows[lengths[rows] == depth + 1]
            self._ends[ended] = node[ended]
            level = np.arange(count, count + int(new.sum()))
            count += len(level)
        first_child.append(np.zeros(len(level), np.int64))
        children.append(np.zeros(len(level), np.int64))
        self._bytes = np.concatenate(bytes_of)
        self._first_child, self._children = np.concatenate(first_child), np.concatenate(children)

    def allowed(self, automaton: Automaton, state: int, always: Iterable[int] = ()) -> Bools:
        """Return which tokens may follow in ``state``: bool ``[size]``, with the tokens ``always`` allowed."""
        reached = np.zeros(len(self._bytes), bool)
        nodes, states = np.zeros(1, np.int64), np.array([state], np.int32)
        while len(nodes):
            born = self._children[nodes]
            first = np.repeat(self._first_child[nodes] - (np.cumsum(born) - born), born)
            below = first + np.arange(len(first))
            automaton.expand(states)
            after = automaton.table[np.repeat(states, born), self._bytes[below]]
            alive = after != DEAD
            nodes, states = below[alive], after[alive]
            reached[nodes] = True
        result = np.zeros(self.size, bool)
        result[self._ids[reached[self._ends]]] = True
        result[[token for token in always if token < self.size]] = True
        return result
