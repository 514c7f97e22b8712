# ruff: noqa: E501 (the table of facts reads better with one phrase list a line)
"""Handbooks: made-up documents full of facts, with questions whose answers stand in them.

It knows how to write a handbook of any length, its variant that differs in one line, and questions with their one
right answer. It knows no tokens: lengths are measured by a function that the caller gives. The course uses it too:

    book = write(random.Random(7), "heldout", length=384, measure=count_tokens)
    other, line = book.variant(random.Random(8))
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from minisgl.tutor.words import (
    ADJECTIVES,
    ANIMALS,
    CLUBS,
    COLORS,
    COMMON_WORDS,
    DAYS,
    FOODS,
    GROUPS,
    ITEMS,
    LAST_NAMES,
    MATERIALS,
    MONTHS,
    PLACES,
    THINGS,
    VERBS,
    Split,
    chance,
    draw,
    invent,
    number,
    person,
)  # fmt: skip

ABSENT = "The handbook does not say."
Maker = Callable[[random.Random, Split], str]


def _place(rng: random.Random, split: Split) -> str:
    if split == "train" and chance(rng, 15):
        return rng.choice(PLACES)
    return draw(split, lambda: f"{rng.choice(ADJECTIVES)} {rng.choice(PLACES)}")


def _group(rng: random.Random, split: Split) -> str:
    return draw(split, lambda: f"{rng.choice(CLUBS)} {rng.choice(GROUPS)}")


def _item(rng: random.Random, split: Split) -> str:
    if chance(rng, 40):
        return rng.choice(ITEMS)
    return draw(split, lambda: f"{rng.choice((*ADJECTIVES, *MATERIALS))} {rng.choice(ITEMS)}")


def _thing(rng: random.Random, split: Split) -> str:
    return draw(split, lambda: f"{rng.choice((*ADJECTIVES, *THINGS))} {rng.choice(THINGS)}")


def _coined(rng: random.Random, split: Split) -> str:
    return draw(split, lambda: invent(rng, rng.choice((2, 2, 3)))).capitalize()


def _event(rng: random.Random, split: Split) -> str:
    return draw(split, lambda: f"{rng.choice(('loud', 'small', 'big', 'sudden', *COLORS))} {rng.choice(THINGS)}")


def _time(rng: random.Random, split: Split) -> str:
    def make() -> str:
        style = rng.randrange(6)
        if style == 0:
            return f"{rng.randint(1, 12)} {rng.choice(('am', 'pm'))}"
        if style == 1:
            return f"{rng.randint(1, 12)}:{rng.choice(('15', '30', '45'))} {rng.choice(('am', 'pm'))}"
        return f"{rng.randint(5, 23)}:{rng.randrange(0, 60, 5):02d}"

    return draw(split, make)


def _day(rng: random.Random, split: Split) -> str:
    return rng.choice(DAYS) if chance(rng, 80) else f"{rng.choice(DAYS)} {rng.choice(('morning', 'evening', 'night'))}"


def _date(rng: random.Random, split: Split) -> str:
    return draw(split, lambda: f"{rng.choice(MONTHS)} {rng.randint(1, 28)}")


def _room(rng: random.Random, split: Split) -> str:
    return f"room {number(rng, split, rng.choice((1, 2, 3, 3)))}" if chance(rng, 70) else f"the {_place(rng, split)}"


def _price(rng: random.Random, split: Split) -> str:
    coin = rng.choice(("coins", "coins", "coins", "euros", "dollars", "credits", "tokens"))
    return f"{number(rng, split, rng.choice((1, 2, 2, 3)))} {coin}"


def _secret(rng: random.Random, split: Split) -> str:
    return draw(
        split, lambda: rng.choice((rng.choice(COMMON_WORDS), invent(rng), f"{invent(rng)}{rng.randint(1, 99)}"))
    )


def _digits(*lengths: int) -> Maker:
    return lambda rng, split: number(rng, split, rng.choice(lengths))


def _one_of(*lists: tuple[str, ...]) -> Maker:
    return lambda rng, split: rng.choice(rng.choice(lists))


def _year(rng: random.Random, split: Split) -> str:
    return draw(split, lambda: str(rng.randint(1700, 2030)))


def _action(rng: random.Random, split: Split) -> str:
    verb = rng.choice(("go to", "wait in", "meet at", "call", "leave through", "bring a blanket to", "report to"))
    return f"{verb} the {_place(rng, split)}"


def _duty(rng: random.Random, split: Split) -> str:
    return f"{rng.choice(VERBS)} the {rng.choice(ITEMS)}"


@dataclass(frozen=True)
class Kind:
    """One kind of fact: how entity and value are made, stated, asked for and answered."""

    name: str
    entity: Maker
    value: Maker
    says: tuple[str, ...]
    asks: tuple[str, ...]
    reply: str


def _kind(name: str, entity: Maker, value: Maker, says: str, asks: str, reply: str) -> Kind:
    return Kind(name, entity, value, (*says.split("|"), reply), tuple(asks.split("|")), reply)


KINDS: tuple[Kind, ...] = (
    _kind("opens", _place, _time, "Opening time of the {e}: {v}.|You can enter the {e} from {v}.|The doors of the {e} open at {v}.",
          "When does the {e} open?|What time does the {e} open?|At what time does the {e} open?|What is the opening time of the {e}?", "The {e} opens at {v}."),
    _kind("closes", _place, _time, "Closing time of the {e}: {v}.|You must leave the {e} by {v}.",
          "When does the {e} close?|What time does the {e} close?|What is the closing time of the {e}?", "The {e} closes at {v}."),
    _kind("meets", _group, _room, "Meeting place of the {e}: {v}.|You find the {e} in {v}.",
          "Where does the {e} meet?|In which room does the {e} meet?|Where can I find the {e}?", "The {e} meets in {v}."),
    _kind("day", _group, _day, "Day of the {e}: {v}.|Every {v} the {e} comes together.",
          "When does the {e} meet?|On which day does the {e} meet?|What day does the {e} meet?", "The {e} meets on {v}."),
    _kind("leads", _group, person, "{v} leads the {e}.|Leader of the {e}: {v}.|Ask {v} about the {e}.",
          "Who leads the {e}?|Who is the leader of the {e}?|Who is in charge of the {e}?", "The {e} is led by {v}."),
    _kind("led", person, _group, "The {v} is run by {e}.|{e} takes care of the {v}.",
          "What does {e} run?|Which group does {e} run?|What is {e} responsible for?", "{e} runs the {v}."),
    _kind("extension", person, _digits(3, 4, 4), "Extension of {e}: {v}.|{e} can be called at {v}.|Call {v} to reach {e}.",
          "What is the extension of {e}?|How can I call {e}?|What is {e}'s extension?|Which number has {e}?", "The extension of {e} is {v}."),
    _kind("price", _item, _price, "Price of the {e}: {v}.|For {v} you get the {e}.|The {e} is sold for {v}.",
          "How much does the {e} cost?|What does the {e} cost?|What is the price of the {e}?|How much is the {e}?", "The {e} costs {v}."),
    _kind("code", _place, _digits(3, 4, 4, 5), "Door code of the {e}: {v}.|Type {v} to open the {e}.|Enter {v} at the {e}.",
          "What is the door code of the {e}?|Which code opens the {e}?|What is the code of the {e}?", "The door code of the {e} is {v}."),
    _kind("password", _place, _secret, "Password of the {e}: {v}.|Say {v} at the {e}.",
          "What is the password of the {e}?|Which password does the {e} have?|What is the password for the {e}?", "The password of the {e} is {v}."),
    _kind("key", _place, _place, "Key of the {e}: in the {v}.|Look in the {v} for the key to the {e}.",
          "Where is the key to the {e}?|Where is the key of the {e}?|Where do I find the key to the {e}?", "The key to the {e} is in the {v}."),
    _kind("floor", _place, _digits(1, 1, 2), "Floor of the {e}: {v}.|To reach the {e}, go up to floor {v}.",
          "On which floor is the {e}?|Which floor is the {e} on?|Where is the {e}?", "The {e} is on floor {v}."),
    _kind("chairs", _place, _digits(1, 2, 3), "Chairs in the {e}: {v}.|The {e} has {v} chairs.",
          "How many chairs are in the {e}?|How many chairs does the {e} have?", "There are {v} chairs in the {e}."),
    _kind("people", _place, _digits(1, 2, 3), "Limit for the {e}: {v} people.|The {e} holds up to {v} people.",
          "How many people may enter the {e}?|How many people fit in the {e}?|What is the limit for the {e}?", "At most {v} people may enter the {e}."),
    _kind("paint", _place, _one_of(COLORS), "Color of the {e}: {v}.|They painted the {e} {v}.",
          "What color is the {e}?|Which color does the {e} have?|What is the color of the {e}?", "The {e} is painted {v}."),
    _kind("likes", person, _one_of(FOODS, ITEMS), "Favorite of {e}: {v}.|What {e} likes best is {v}.",
          "What does {e} like?|What does {e} like best?|What is the favorite of {e}?", "{e} likes {v} best."),
    _kind("birthday", person, _date, "Birthday of {e}: {v}.|On {v}, {e} has a birthday.|{e} was born on {v}.",
          "When is the birthday of {e}?|When is {e}'s birthday?|When was {e} born?", "The birthday of {e} is {v}."),
    _kind("pet", person, _coined, "{e} has a pet called {v}.|Pet of {e}: {v}.",
          "What is the name of {e}'s pet?|What is the pet of {e} called?", "The pet of {e} is called {v}."),
    _kind("animal", _coined, _one_of(ANIMALS), "Our {v} is named {e}.|{e}, the {v}, lives here.",
          "What kind of animal is {e}?|Which animal is {e}?|What is {e}?", "{e} is a {v}."),
    _kind("loan", _item, _digits(1, 2), "Loan time of the {e}: {v} days.|Bring the {e} back after {v} days.",
          "For how many days can I borrow the {e}?|How long can I borrow the {e}?", "You can borrow the {e} for {v} days."),
    _kind("bus", _place, _digits(1, 2, 3), "Bus to the {e}: {v}.|Take bus {v} to the {e}.",
          "Which bus goes to the {e}?|How do I get to the {e}?", "Bus {v} goes to the {e}."),
    _kind("built", _place, _year, "Year of the {e}: {v}.|In {v} they built the {e}.",
          "When was the {e} built?|In which year was the {e} built?|How old is the {e}?", "The {e} was built in {v}."),
    _kind("founded", _group, person, "{v} founded the {e}.|Founder of the {e}: {v}.",
          "Who founded the {e}?|Who is the founder of the {e}?", "The {e} was founded by {v}."),
    _kind("shelf", _item, _digits(1, 2, 3), "Shelf of the {e}: {v}.|Look for the {e} on shelf {v}.",
          "Where is the {e}?|On which shelf is the {e}?|Where can I find the {e}?", "The {e} is on shelf {v}."),
    _kind("weight", _item, _digits(1, 2, 3), "Weight of the {e}: {v} kilograms.|With {v} kilograms, the {e} is in the list.",
          "How heavy is the {e}?|How much does the {e} weigh?|What is the weight of the {e}?", "The {e} weighs {v} kilograms."),
    _kind("made", _item, _one_of(MATERIALS), "Material of the {e}: {v}.|They used {v} for the {e}.",
          "What is the {e} made of?|Which material is the {e} made of?", "The {e} is made of {v}."),
    _kind("distance", _place, _digits(2, 3, 4), "Way to the {e}: {v} meters.|Walk {v} meters to the {e}.",
          "How far is the {e}?|How far away is the {e}?|How many meters is it to the {e}?", "It is {v} meters to the {e}."),
    _kind("job", person, _duty, "Task of {e}: {v}.|On duty, {e} has to {v}.",
          "What must {e} do?|What is the task of {e}?|What is the job of {e}?", "{e} must {v}."),
    _kind("event", _event, _action, "If there is a {e}, {v}.|What to do when you see a {e}: {v}.",
          "What should I do in case of a {e}?|What do I do if there is a {e}?", "In case of a {e}, {v}."),
    _kind("wifi", _place, _secret, "Wifi in the {e}: {v}.|In the {e}, use the network {v}.",
          "What is the wifi of the {e}?|Which network is in the {e}?|What is the wifi in the {e}?", "The wifi of the {e} is {v}."),
    _kind("label", _thing, _digits(2, 3, 4), "Number of the {e}: {v}.|{v} stands for the {e}.",
          "What is the number of the {e}?|Which number has the {e}?", "The number of the {e} is {v}."),
    _kind("symbol", _coined, _one_of(THINGS, ANIMALS), "Symbol of {e}: a {v}.|A {v} stands for {e}.",
          "What is the symbol of {e}?|Which symbol does {e} have?", "The symbol of {e} is a {v}."),
    _kind("home", _coined, _place, "Home of {e}: the {v}.|{e} lives in the {v}.",
          "Where does {e} live?|Where is {e}?|Where is the home of {e}?", "{e} lives in the {v}."),
    _kind("mayor", _coined, person, "{v} is the head of {e}.|Head of {e}: {v}.",
          "Who is the head of {e}?|Who leads {e}?", "The head of {e} is {v}."),
)  # fmt: skip
_ARTICLE = re.compile(r"\b([Aa]) (?=[aeiou])")
_FILLER = (
    "Please be kind to each other.", "Keep the doors closed at night.", "Ask the staff if something is broken.",
    "Welcome, and enjoy your stay.", "Do not run in the corridors.", "Thank you for reading all of this.",
    "Pets must stay outside.", "Wear good shoes.", "Lost things are kept for a month.", "Turn off the lights.",
)  # fmt: skip
_TITLES = (
    "Handbook of the {p}", "The {n} handbook", "{n} Handbook", "Rules of the {p}", "Notes about {n}", "Guide to the {p}",
    "Handbook", "House rules", "Facts", "Welcome to {n}", "Handbook for guests of {n}", "Handbook of the {l} school",
)  # fmt: skip


@dataclass(frozen=True)
class Fact:
    """One fact, with the line that states it."""

    kind: Kind
    entity: str
    value: str
    line: str

    @property
    def answer(self) -> str:
        """The one right answer, a full sentence."""
        return _sentence(self.kind.reply.format(e=self.entity, v=self.value))

    def ask(self, rng: random.Random) -> str:
        """A question for this fact."""
        return _sentence(rng.choice(self.kind.asks).format(e=self.entity))


@dataclass(frozen=True)
class Handbook:
    """A title and lines; some lines state a fact, others (`None` in `facts`) only fill."""

    title: str
    lines: tuple[str, ...]
    facts: tuple[Fact | None, ...]
    split: Split

    @property
    def text(self) -> str:
        """The handbook as it stands in a prompt."""
        return "\n".join((self.title, *self.lines) if self.title else self.lines)

    @property
    def known(self) -> list[Fact]:
        """All facts, in the order of their lines."""
        return [fact for fact in self.facts if fact is not None]

    def absent(self, rng: random.Random) -> str:
        """A question that this handbook does not answer."""
        kind = rng.choice(self.known).kind if chance(rng, 70) else rng.choice(KINDS)
        others = [fact.entity for fact in self.known if fact.kind.entity is kind.entity]
        entity = rng.choice(others) if others and chance(rng, 50) else kind.entity(rng, self.split)
        if _states(self.known, kind, entity):
            return self.absent(rng)
        return _sentence(rng.choice(kind.asks).format(e=entity))

    def variant(self, rng: random.Random) -> tuple[Handbook, Fact]:
        """The same handbook with another value in one line, and the fact of that line."""
        at = rng.choice([i for i, fact in enumerate(self.facts) if fact is not None])
        old = self.facts[at]
        assert old is not None
        value = old.value
        while value == old.value:
            value = old.kind.value(rng, self.split)
        prefix = self.lines[at][: len(self.lines[at]) - len(old.line)]
        line = _sentence(rng.choice(old.kind.says).format(e=old.entity, v=value))
        new = replace(old, value=value, line=line)
        lines = (*self.lines[:at], prefix + line, *self.lines[at + 1 :])
        return replace(self, lines=lines, facts=(*self.facts[:at], new, *self.facts[at + 1 :])), new


def write(
    rng: random.Random, split: Split, length: int, measure: Callable[[str], int] = len, titled: bool | None = None
) -> Handbook:
    """A handbook that measures at most `length` (characters unless told), and nearly that.

    Entities and values come from the given side of the split. No two facts answer the same question.
    """
    title = "" if titled is False or (titled is None and chance(rng, 20)) else _title(rng, split)
    bullet = rng.choice(("", "", "", "- ", "- ", "* "))
    pools: dict[Maker, list[str]] = {}
    lines: list[str] = []
    facts: list[Fact | None] = []
    seen: dict[str, list[Fact]] = {}
    size = measure(title) + 1
    kinds = KINDS if chance(rng, 70) else rng.sample(KINDS, rng.randint(2, 10))
    while True:
        fact = None if chance(rng, 4) and lines else _fact(rng, split, rng.choice(kinds), pools, length)
        if fact is not None:
            if _states(seen.get(fact.entity, ()), fact.kind, fact.entity):
                continue
            seen.setdefault(fact.entity, []).append(fact)
        line = bullet + (fact.line if fact is not None else rng.choice(_FILLER))
        size += measure(line + "\n")
        if size > length and lines:
            return Handbook(title, tuple(lines), tuple(facts), split)
        lines.append(line)
        facts.append(fact)


def _fact(rng: random.Random, split: Split, kind: Kind, pools: dict[Maker, list[str]], length: int) -> Fact:
    pool = pools.setdefault(kind.entity, [])
    if pool and chance(rng, 35):
        entity = rng.choice(pool)
    else:
        entity = kind.entity(rng, split)
        pool.append(entity)
    value = kind.value(rng, split)
    return Fact(kind, entity, value, _sentence(rng.choice(kind.says).format(e=entity, v=value)))


def _states(facts: Iterable[Fact], kind: Kind, entity: str) -> bool:
    return any(fact.kind.name == kind.name and fact.entity == entity for fact in facts)


def _title(rng: random.Random, split: Split) -> str:
    title = rng.choice(_TITLES).format(p=_place(rng, split), n=_coined(rng, split), l=rng.choice(LAST_NAMES))
    return rng.choice(("# ", "", "", "", "## ")) + title


def _sentence(text: str) -> str:
    """`text` with a capital first letter and the right indefinite articles."""
    return _ARTICLE.sub(r"\1n ", text[:1].upper() + text[1:])
