"""Random small grammars, and what they allow: by Brzozowski's derivatives, without a network or an automaton.

A grammar is JSON. ``["text", 97, 98]`` is these bytes, ``["range", 97, 99]`` one byte of the range, ``["seq", x, …]``
parts one after another, ``["any", x, …]`` one of the parts (none: no text at all), ``["repeat", x, least, most]`` a
part several times (most -1: any number), and ``["rule", i]`` the rule i. Derivatives of Regular Expressions, 1964: the
texts that go on after a byte are a grammar again. Nothing here is like the solution of lab `grammar`.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from minisgl.chapters.lab.grader.gate import Invalid
from minisgl.plugins.grammar.network import (
    Expression,
    GrammarTooLargeError,
    Network,
    byte,
    choice,
    literal,
    repeat,
    rule,
    sequence,
)

__all__ = ["ALPHABET", "Grammar", "make_grammar", "make_text", "network", "shown"]

Tree = tuple[Any, ...]
ALPHABET = b"ab(1"
NOTHING: Tree = ("any",)
EMPTY: Tree = ("seq",)
LARGEST = 4_000
"""The largest derivative, in characters of its text: a workload with a larger one is skipped."""


def _tree(value: Any) -> Tree:
    return tuple(_tree(each) if isinstance(each, list) else each for each in value)


class Grammar:
    """A grammar and its ``rules``.

    Raise `Invalid` for what is no grammar, and for a rule that begins with itself, or that calls itself and has several
    calls: an automaton may refuse it, because a text may then be at very many places.
    """

    def __init__(self, tree: Any, rules: Sequence[Any]):
        self.rules = [_tree(each) for each in rules]
        self.tree = _tree(tree)
        for each in (self.tree, *self.rules):
            self._check(each)
        self._empty = self._fixpoint(self._may_be_empty)
        self._useful = self._fixpoint(self._may_end)
        self._after: dict[tuple[Tree, int], Tree] = {}
        begins = {i: self._begins(each) for i, each in enumerate(self.rules)}
        calls = {i: _calls(each) for i, each in enumerate(self.rules)}
        for i in range(len(self.rules)):
            if i in _reached(begins, i) or (i in _reached(calls, i) and len(calls[i]) > 1):
                raise Invalid

    def _check(self, tree: Tree) -> None:
        if not tree:
            raise Invalid
        kind, *parts = tree
        ints = all(isinstance(each, int) for each in parts)
        if kind in ("seq", "any"):
            for part in parts:
                if not isinstance(part, tuple):
                    raise Invalid
                self._check(part)
        elif kind == "repeat":
            if len(parts) != 3 or not isinstance(parts[0], tuple) or not all(isinstance(n, int) for n in parts[1:]):
                raise Invalid
            if parts[1] < 0 or (parts[2] != -1 and parts[2] < parts[1]) or max(parts[1:]) > 50:
                raise Invalid
            self._check(parts[0])
        elif kind == "text":
            if not ints or not all(32 < each < 127 for each in parts):
                raise Invalid
        elif kind == "range":
            if not ints or len(parts) != 2 or not 32 < parts[0] <= parts[1] < 127:
                raise Invalid
        elif kind != "rule" or len(parts) != 1 or not ints or not 0 <= parts[0] < len(self.rules):
            raise Invalid

    def _fixpoint(self, holds: Any) -> set[int]:
        found: set[int] = set()
        while True:
            more = {i for i, body in enumerate(self.rules) if holds(body, found)}
            if more == found:
                return found
            found = more

    def _may_be_empty(self, tree: Tree, rules: set[int]) -> bool:
        kind, *parts = tree
        if kind == "seq":
            return all(self._may_be_empty(part, rules) for part in parts)
        if kind == "any":
            return any(self._may_be_empty(part, rules) for part in parts)
        if kind == "repeat":
            return parts[1] == 0 or self._may_be_empty(parts[0], rules)
        return parts[0] in rules if kind == "rule" else kind == "text" and not parts

    def _may_end(self, tree: Tree, rules: set[int]) -> bool:
        kind, *parts = tree
        if kind == "seq":
            return all(self._may_end(part, rules) for part in parts)
        if kind == "any":
            return any(self._may_end(part, rules) for part in parts)
        if kind == "repeat":
            return parts[1] == 0 or self._may_end(parts[0], rules)
        return kind != "rule" or parts[0] in rules

    def _begins(self, tree: Tree) -> set[int]:
        """Return the rules with which a text of ``tree`` may begin."""
        kind, *parts = tree
        if kind == "rule":
            return {parts[0]}
        found: set[int] = set()
        if kind == "repeat":
            return self._begins(parts[0])
        if kind in ("seq", "any"):
            for part in parts:
                found |= self._begins(part)
                if kind == "seq" and not self._may_be_empty(part, self._empty):
                    break
        return found

    def after(self, tree: Tree, value: int) -> Tree:
        """Return the grammar of the texts that go on after a byte."""
        found = self._after.get((tree, value))
        if found is None:
            found = self._after[tree, value] = self._derivative(tree, value)
            if len(repr(found)) > LARGEST:
                raise Invalid
        return found

    def _derivative(self, tree: Tree, value: int) -> Tree:
        kind, *parts = tree
        if kind == "text":
            return ("text", *parts[1:]) if parts and parts[0] == value else NOTHING
        if kind == "range":
            return EMPTY if parts[0] <= value <= parts[1] else NOTHING
        if kind == "rule":
            return self.after(self.rules[parts[0]], value)
        if kind == "repeat":
            part, least, most = parts
            if most == 0:
                return NOTHING
            return _seq(self.after(part, value), ("repeat", part, max(least - 1, 0), most - (most > 0)))
        found: list[Tree] = []
        for i, part in enumerate(parts):
            after = self.after(part, value)
            found.append(_seq(after, *parts[i + 1 :]) if kind == "seq" else after)
            if kind == "seq" and not self._may_be_empty(part, self._empty):
                break
        return _any(found)

    def walk(self, text: bytes) -> Tree:
        """Return the grammar of the texts that go on after ``text``."""
        tree = self.tree
        for value in text:
            tree = self.after(tree, value)
        return tree

    def goes_on(self, tree: Tree, dead_ends: bool = False) -> bool:
        """Return whether a text leads from here to an end. With ``dead_ends``, what has no end goes on too."""
        return tree != NOTHING if dead_ends else self._may_end(tree, self._useful)

    def ends(self, tree: Tree) -> bool:
        """Return whether a text may end here."""
        return self._may_be_empty(tree, self._empty)


def _calls(tree: Tree) -> list[int]:
    """Return the rules that are called in ``tree``, those in a repetition twice."""
    kind, *parts = tree
    if kind == "rule":
        return [parts[0]]
    inside = [rule for part in parts if isinstance(part, tuple) for rule in _calls(part)]
    return inside * 2 if kind == "repeat" else inside


def _reached(edges: Mapping[int, Collection[int]], start: int) -> set[int]:
    """Return the rules that are reached from a rule by one edge or more."""
    found: set[int] = set()
    todo = list(edges[start])
    while todo:
        rule = todo.pop()
        if rule not in found:
            found.add(rule)
            todo += edges[rule]
    return found


def _seq(*parts: Tree) -> Tree:
    if NOTHING in parts:
        return NOTHING
    flat: list[Tree] = []
    for part in parts:
        flat += part[1:] if part[0] == "seq" else () if part == ("text",) else (part,)
    return flat[0] if len(flat) == 1 else ("seq", *flat)


def _any(parts: Sequence[Tree]) -> Tree:
    flat: list[Tree] = []
    for part in parts:
        flat += [each for each in (part[1:] if part[0] == "any" else (part,)) if each not in flat]
    return flat[0] if len(flat) == 1 else ("any", *flat)


def network(tree: Any, rules: Sequence[Any]) -> Network:
    """Return a grammar as the network that a student's automaton gets."""

    def expression(value: Any) -> Expression:
        kind, *parts = value
        if kind == "text":
            return literal(bytes(parts))
        if kind == "range":
            return byte(*parts)
        if kind == "rule":
            return rule(str(parts[0]), lambda net, start: expression(rules[parts[0]])(net, start))
        if kind == "repeat":
            return repeat(expression(parts[0]), parts[1], None if parts[2] < 0 else parts[2])
        return (sequence if kind == "seq" else choice)(*map(expression, parts))

    try:
        return Network(expression(tree))
    except GrammarTooLargeError:
        raise Invalid from None


def shown(tree: Any) -> str:
    """Return a grammar in a short notation, such as ``(ab|[a-c])*``. A rule is its number in angle brackets."""
    kind, *parts = tree
    if kind == "text":
        return bytes(parts).decode("latin-1") or "''"
    if kind == "range":
        return f"[{chr(parts[0])}-{chr(parts[1])}]"
    if kind == "rule":
        return f"<{parts[0]}>"
    if kind == "repeat":
        most = "" if parts[2] < 0 else parts[2]
        return f"({shown(parts[0])})" + ("*" if parts[1:] == [0, -1] else f"{{{parts[1]},{most}}}")
    if kind == "any":
        return "(" + "|".join(map(shown, parts)) + ")" if parts else "<nothing>"
    return " ".join(map(shown, parts)) or "''"


# ---- at random -------------------------------------------------------------------------------------------------


def make_grammar(rng: random.Random, size: int) -> tuple[list[Any], list[list[Any]]]:
    """Return a random grammar with some text, and its rules, which may call each other and themselves."""
    for _ in range(1_000):
        number = rng.choice([0, 1, 1, 2, 3])
        rules = [_random(rng, 2 + (size > 10), number) for _ in range(number)]
        tree = _random(rng, 2 + (size > 6), number)
        try:
            grammar = Grammar(tree, rules)
            if grammar.goes_on(grammar.tree):
                return tree, rules
        except Invalid:
            continue
    return ["text", 97], []


def _random(rng: random.Random, depth: int, rules: int) -> list[Any]:
    kind = rng.random()
    if depth == 0 or kind < 0.2:
        if rules and rng.random() < 0.35:
            return ["seq", ["text", rng.choice(ALPHABET)], ["rule", rng.randrange(rules)], ["text", rng.choice(b"ab")]]
        return ["range", 97, 98] if rng.random() < 0.3 else ["text", *rng.choices(ALPHABET, k=rng.choice([0, 1, 1, 2]))]
    if kind < 0.5:
        return ["seq", *(_random(rng, depth - 1, rules) for _ in range(rng.choice([1, 2, 2, 3])))]
    if kind < 0.8:
        return ["any", *(_random(rng, depth - 1, rules) for _ in range(rng.choice([0, 1, 2, 2, 3])))]
    if kind < 0.9 and rules:
        return ["rule", rng.randrange(rules)]
    least = rng.choice([0, 0, 1, 2])
    return ["repeat", _random(rng, depth - 1, rules), least, rng.choice([-1, least, least + 1])]


def make_text(rng: random.Random, grammar: Grammar, most: int) -> list[int]:
    """Return a random text that mostly follows the grammar."""
    text: list[int] = []
    tree = grammar.tree
    for _ in range(rng.randint(0, most)):
        good = [value for value in ALPHABET if grammar.after(tree, value) != NOTHING]
        text.append(rng.choice(good) if good and rng.random() < 0.9 else rng.choice(ALPHABET))
        tree = grammar.after(tree, text[-1])
        if tree == NOTHING:
            break
    return text
