"""Handbooks: invented documents of facts, with questions that the documents answer.

This module writes handbooks of any length, variants that differ in one line, and questions with their only right
answer. It knows nothing of tokens: the caller passes a function that measures lengths. The course uses handbooks too:

    book = write(random.Random(7), "heldout", length=384, measure=count_tokens)
    other, fact = book.variant(random.Random(8))
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from minisgl.chapters.tutor.facts import KINDS, PAIRS, Kind, Maker, coined, place
from minisgl.chapters.tutor.words import LAST_NAMES, Split, chance

ABSENT = "The handbook does not say."
_ARTICLE = re.compile(r"\b([Aa]) (?=[aeiou])")
_BY_NAME = {kind.name: kind for kind in KINDS}
_ASKED = {name: {text for kind in KINDS if kind.name == name for text in kind.asks} for name in _BY_NAME}
_FILLER = (
    "Please be kind to each other.", "Keep the doors closed at night.", "Ask the staff if something is broken.",
    "Welcome, and enjoy your stay.", "Do not run in the corridors.", "Thank you for reading all of this.",
    "Pets must stay outside.", "Wear good shoes.", "Lost things are kept for a month.", "Turn off the lights.",
)  # fmt: skip
_TITLES = (
    "Handbook of the {p}", "The {n} handbook", "{n} Handbook", "Rules of the {p}", "Notes about {n}",
    "Guide to the {p}",
    "Handbook", "House rules", "Facts", "Welcome to {n}", "Handbook for guests of {n}", "Handbook of the {l} school",
)  # fmt: skip


@dataclass(frozen=True)
class Fact:
    """One fact of a handbook: a kind of fact, the entity it is about, and the value."""

    kind: Kind
    entity: str
    value: str

    @property
    def answer(self) -> str:
        """The only right answer to a question about this fact, a full sentence."""
        return _sentence(self.kind.reply.format(e=self.entity, v=self.value))

    def state(self, rng: random.Random) -> str:
        """Return a line that states this fact."""
        return _sentence(rng.choice(self.kind.says).format(e=self.entity, v=self.value))

    def ask(self, rng: random.Random) -> str:
        """Return a question that this fact answers."""
        return _sentence(rng.choice(self.kind.asks).format(e=self.entity))


@dataclass(frozen=True)
class Handbook:
    """A title and lines. Each line states one fact or two facts; a filler line states none."""

    title: str
    lines: tuple[str, ...]
    facts: tuple[tuple[Fact, ...], ...]
    split: Split

    @property
    def text(self) -> str:
        """The text of the handbook, as a prompt contains it."""
        return "\n".join((self.title, *self.lines) if self.title else self.lines)

    @property
    def known(self) -> list[Fact]:
        """All facts of the handbook, in the order of their lines."""
        return [fact for facts in self.facts for fact in facts]

    def absent(self, rng: random.Random) -> str:
        """Return a question that this handbook does not answer."""
        known = self.known
        while True:
            kind = rng.choice(known).kind if chance(rng, 70) else rng.choice(KINDS)
            others = [fact.entity for fact in known if fact.kind.entity is kind.entity]
            entity = rng.choice(others) if others and chance(rng, 50) else kind.entity(rng, self.split)
            if not _states(known, kind, entity):
                return _sentence(rng.choice(kind.asks).format(e=entity))

    def variant(self, rng: random.Random) -> tuple[Handbook, Fact]:
        """Return the same handbook with another value in one line, and the fact that this line now states."""
        at = rng.choice([i for i, facts in enumerate(self.facts) if len(facts) == 1] or [0])
        (old,) = self.facts[at][:1]
        value = old.value
        while value == old.value:
            value = old.kind.value(rng, self.split)
        new = replace(old, value=value)
        bullet = self.lines[at][:2] if self.lines[at][:2] in ("- ", "* ") else ""
        lines = (*self.lines[:at], bullet + new.state(rng), *self.lines[at + 1 :])
        return replace(self, lines=lines, facts=(*self.facts[:at], (new,), *self.facts[at + 1 :])), new


def write(
    rng: random.Random, split: Split, length: int, measure: Callable[[str], int] = len, titled: bool | None = None
) -> Handbook:
    """Return a handbook with a length of nearly, but at most, ``length``; ``measure`` gives the length of a text.

    Entities and values belong to the given split. No two facts answer the same question. There is at least one line,
    even if that line exceeds ``length``, and the first line states a fact. ``titled``: with or without a title; None:
    at random.
    """
    title = "" if titled is False or (titled is None and chance(rng, 20)) else _title(rng, split)
    bullet = rng.choice(("", "", "", "- ", "- ", "* "))
    pools: dict[Maker, list[str]] = {}
    lines: list[str] = []
    facts: list[tuple[Fact, ...]] = []
    seen: dict[str, list[Fact]] = {}
    size = measure(title) + 1
    kinds = KINDS if chance(rng, 70) else tuple(rng.sample(KINDS, rng.randint(2, 10)))
    stated: tuple[Fact, ...]
    while True:
        if chance(rng, 4) and lines:
            line, stated = rng.choice(_FILLER), ()
        else:
            line, stated = _state_something(rng, split, kinds, pools)
            if any(_states(seen.get(fact.entity, ()), fact.kind, fact.entity) for fact in stated):
                continue
        size += measure(bullet + line + "\n")
        if size > length and lines:
            return Handbook(title, tuple(lines), tuple(facts), split)
        for fact in stated:
            seen.setdefault(fact.entity, []).append(fact)
        lines.append(bullet + line)
        facts.append(stated)


def _state_something(
    rng: random.Random, split: Split, kinds: tuple[Kind, ...], pools: dict[Maker, list[str]]
) -> tuple[str, tuple[Fact, ...]]:
    """Return a line and the facts that it states: one, or at times two about the same entity."""
    fact = _fact(rng, split, rng.choice(kinds), pools)
    if not chance(rng, 12):
        return fact.state(rng), (fact,)
    if chance(rng, 50):
        first, second, pattern = rng.choice(PAIRS)
        fact = _fact(rng, split, _BY_NAME[first], pools)
        other = replace(fact, kind=_BY_NAME[second], value=_BY_NAME[second].value(rng, split))
        return _sentence(pattern.format(e=fact.entity, v=fact.value, w=other.value)), (fact, other)
    kind = rng.choice([kind for kind in KINDS if kind.entity is fact.kind.entity])
    other = replace(fact, kind=kind, value=kind.value(rng, split))
    subject = next((text for text in (f"The {fact.entity} ", f"{fact.entity} ") if other.answer.startswith(text)), None)
    if subject is None or not fact.answer.startswith(subject) or _states((fact,), kind, fact.entity):
        return fact.state(rng), (fact,)
    joint = rng.choice((" and ", ", and ", ", ", "; it "))
    return fact.answer[:-1] + joint + other.answer[len(subject) :], (fact, other)


def _fact(rng: random.Random, split: Split, kind: Kind, pools: dict[Maker, list[str]]) -> Fact:
    pool = pools.setdefault(kind.entity, [])
    if pool and chance(rng, 35):
        entity = rng.choice(pool)
    else:
        entity = kind.entity(rng, split)
        pool.append(entity)
    return Fact(kind, entity, kind.value(rng, split))


def _states(facts: Iterable[Fact], kind: Kind, entity: str) -> bool:
    """Return whether one of the facts answers a question that may be asked for this kind and entity."""
    return any(fact.entity == entity and not _ASKED[fact.kind.name].isdisjoint(kind.asks) for fact in facts)


def _title(rng: random.Random, split: Split) -> str:
    title = rng.choice(_TITLES).format(p=place(rng, split), n=coined(rng, split), l=rng.choice(LAST_NAMES))
    return rng.choice(("# ", "", "", "", "## ")) + title


def _sentence(text: str) -> str:
    """Return ``text`` with a capital first letter and the right indefinite articles."""
    return _ARTICLE.sub(r"\1n ", text[:1].upper() + text[1:])
