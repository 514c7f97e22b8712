# ruff: noqa: E501 (the table reads better with one list of phrases a line)
"""The kinds of facts in a handbook, and random entities and values for them.

A kind defines how its facts are stated, asked for and answered. This module knows nothing of whole handbooks.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from minisgl.chapters.tutor import words
from minisgl.chapters.tutor.words import (
    ADJECTIVES,
    CLUBS,
    COLORS,
    FOODS,
    ITEMS,
    PLACES,
    THINGS,
    VERBS,
    Split,
    chance,
    draw,
    invent,
    number,
)

Maker = Callable[[random.Random, Split], str]
_MEETINGS = (
    "meeting",
    "lesson",
    "party",
    "exam",
    "lecture",
    "dinner",
    "concert",
    "tour",
    "training",
    "game",
    "show",
    "race",
)
_CROWDS = (
    "visitors",
    "students",
    "guests",
    "children",
    "members",
    "teachers",
    "drivers",
    "parents",
    "players",
    "cooks",
)
_ATTRIBUTES = (
    "code", "name", "nickname", "motto", "symbol", "color", "number", "owner", "guard", "height", "length", "age", "size",
    "pin", "address", "smell", "taste", "sound", "sign", "flag", "price", "value", "limit", "keeper", "mascot", "title",
    "secret", "password", "hint", "label", "brand", "model", "version", "start", "end", "deadline", "phone number", "logo",
)  # fmt: skip


def place(rng: random.Random, split: Split) -> str:
    """Return a place such as `old library`."""
    if split == "train" and chance(rng, 15):
        return rng.choice(PLACES)
    return draw(split, lambda: f"{rng.choice(ADJECTIVES)} {rng.choice(PLACES)}")


def _spot(rng: random.Random, split: Split) -> str:
    kind = rng.randrange(10)
    return (place if kind < 6 else _item if kind < 8 else _thing)(rng, split)


def _anyone(rng: random.Random, split: Split) -> str:
    name = words.person(rng, split)
    if split == "train" and chance(rng, 10):
        name = rng.choice((name.split()[0], f"{rng.choice(('Mr.', 'Mrs.', 'Ms.'))} {name.split()[1]}"))
    return f"{rng.choice(('Dr.', 'Dr.', 'Professor', 'Captain'))} {name}" if chance(rng, 8) else name


def _meeting(rng: random.Random, split: Split) -> str:
    def make() -> str:
        return f"{rng.choice((*ADJECTIVES, *THINGS, *CLUBS))} {rng.choice(_MEETINGS)}"

    return draw(split, make)


def _food(rng: random.Random, split: Split) -> str:
    if split == "train" and chance(rng, 30):
        return rng.choice((*FOODS, "coffee", "tea", "water", "parking", "entry", "membership"))
    return draw(split, lambda: f"{rng.choice((*COLORS, *FOODS, 'hot', 'cold', 'fresh', 'old'))} {rng.choice(FOODS)}")


def _crowd(rng: random.Random, split: Split) -> str:
    if split == "train" and chance(rng, 20):
        return rng.choice(_CROWDS)
    return draw(split, lambda: f"{rng.choice((*ADJECTIVES, *words.MOODS, *CLUBS))} {rng.choice(_CROWDS)}")


def _attribute(rng: random.Random, split: Split) -> str:
    def make() -> str:
        attribute = invent(rng, 2) if chance(rng, 15) else rng.choice(_ATTRIBUTES)
        return f"{attribute} of the {_spot(rng, split)}"

    return draw(split, make)


def _when(rng: random.Random, split: Split) -> str:
    kind = rng.randrange(4)
    if kind == 0:
        return f"on {_date(rng, split)}"
    return f"at {_time(rng, split)}" if kind == 1 else f"on {_day(rng, split)}"


def _rule(rng: random.Random, split: Split) -> str:
    where = f" {rng.choice(('in', 'at', 'near', 'behind'))} the {place(rng, split)}" if chance(rng, 40) else ""
    return (
        f"{rng.choice(VERBS)} {rng.choice(('the', 'a', 'their', 'no'))} {rng.choice((*ITEMS, *words.EVERYDAY))}{where}"
    )


def _anything(rng: random.Random, split: Split) -> str:
    makers = (
        coined,
        _secret,
        _digits(1, 2, 3, 4),
        _anyone,
        _one_of(COLORS, FOODS, words.ANIMALS, words.MATERIALS),
        _thing,
        _time,
    )
    return rng.choice(makers)(rng, split)


def _group(rng: random.Random, split: Split) -> str:
    return draw(split, lambda: f"{rng.choice(CLUBS)} {rng.choice(words.GROUPS)}")


def _item(rng: random.Random, split: Split) -> str:
    if chance(rng, 40):
        return rng.choice(ITEMS)
    return draw(split, lambda: f"{rng.choice((*ADJECTIVES, *words.MATERIALS))} {rng.choice(ITEMS)}")


def _thing(rng: random.Random, split: Split) -> str:
    return draw(split, lambda: f"{rng.choice((*ADJECTIVES, *THINGS))} {rng.choice(THINGS)}")


def coined(rng: random.Random, split: Split) -> str:
    """Return an invented name such as `Brondel`."""
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
    return (
        rng.choice(words.DAYS)
        if chance(rng, 80)
        else f"{rng.choice(words.DAYS)} {rng.choice(('morning', 'evening', 'night'))}"
    )


def _date(rng: random.Random, split: Split) -> str:
    return draw(split, lambda: f"{rng.choice(words.MONTHS)} {rng.randint(1, 28)}")


def _room(rng: random.Random, split: Split) -> str:
    return f"room {number(rng, split, rng.choice((1, 2, 3, 3)))}" if chance(rng, 70) else f"the {place(rng, split)}"


def _price(rng: random.Random, split: Split) -> str:
    coin = rng.choice(("coins", "coins", "coins", "euros", "dollars", "credits", "tokens"))
    return f"{number(rng, split, rng.choice((1, 2, 2, 3)))} {coin}"


def _secret(rng: random.Random, split: Split) -> str:
    return draw(
        split, lambda: rng.choice((rng.choice(words.COMMON_WORDS), invent(rng), f"{invent(rng)}{rng.randint(1, 99)}"))
    )


def _digits(*lengths: int) -> Maker:
    return lambda rng, split: number(rng, split, rng.choice(lengths))


def _one_of(*lists: tuple[str, ...]) -> Maker:
    return lambda rng, split: rng.choice(rng.choice(lists))


def _year(rng: random.Random, split: Split) -> str:
    return draw(split, lambda: str(rng.randint(1700, 2030)))


def _action(rng: random.Random, split: Split) -> str:
    verb = rng.choice(("go to", "wait in", "meet at", "call", "leave through", "bring a blanket to", "report to"))
    return f"{verb} the {place(rng, split)}"


def _duty(rng: random.Random, split: Split) -> str:
    return f"{rng.choice(VERBS)} the {rng.choice(ITEMS)}"


@dataclass(frozen=True)
class Kind:
    """One kind of fact: how to make its entity and value, and the templates to state, ask for and answer it."""

    name: str
    entity: Maker
    value: Maker
    says: tuple[str, ...]
    asks: tuple[str, ...]
    reply: str


def _kind(name: str, entity: Maker, value: Maker, says: str, asks: str, reply: str) -> Kind:
    return Kind(name, entity, value, (*says.split("|"), reply), tuple(asks.split("|")), reply)


KINDS: tuple[Kind, ...] = (
    _kind("opens", place, _time, "Opening time of the {e}: {v}.|You can enter the {e} from {v}.|The doors of the {e} open at {v}.",
          "When does the {e} open?|What time does the {e} open?|At what time does the {e} open?|What is the opening time of the {e}?", "The {e} opens at {v}."),
    _kind("closes", place, _time, "Closing time of the {e}: {v}.|You must leave the {e} by {v}.",
          "When does the {e} close?|What time does the {e} close?|What is the closing time of the {e}?", "The {e} closes at {v}."),
    _kind("meets", _group, _room, "Meeting place of the {e}: {v}.|You find the {e} in {v}.",
          "Where does the {e} meet?|In which room does the {e} meet?|Where can I find the {e}?", "The {e} meets in {v}."),
    _kind("day", _group, _day, "Day of the {e}: {v}.|Every {v} the {e} comes together.",
          "When does the {e} meet?|On which day does the {e} meet?|What day does the {e} meet?", "The {e} meets on {v}."),
    _kind("leads", _group, _anyone, "{v} leads the {e}.|Leader of the {e}: {v}.|Ask {v} about the {e}.",
          "Who leads the {e}?|Who is the leader of the {e}?|Who is in charge of the {e}?", "The {e} is led by {v}."),
    _kind("led", _anyone, _group, "The {v} is run by {e}.|{e} takes care of the {v}.",
          "What does {e} run?|Which group does {e} run?|What is {e} responsible for?", "{e} runs the {v}."),
    _kind("extension", _anyone, _digits(3, 4, 4), "Extension of {e}: {v}.|{e} can be called at {v}.|Call {v} to reach {e}.",
          "What is the extension of {e}?|How can I call {e}?|What is {e}'s extension?|Which number has {e}?", "The extension of {e} is {v}."),
    _kind("price", _item, _price, "Price of the {e}: {v}.|For {v} you get the {e}.|The {e} is sold for {v}.",
          "How much does the {e} cost?|What does the {e} cost?|What is the price of the {e}?|How much is the {e}?", "The {e} costs {v}."),
    _kind("code", _spot, _digits(3, 4, 4, 5), "Door code of the {e}: {v}.|Type {v} to open the {e}.|Enter {v} at the {e}.",
          "What is the door code of the {e}?|Which code opens the {e}?|What is the code of the {e}?", "The door code of the {e} is {v}."),
    _kind("password", _spot, _secret, "Password of the {e}: {v}.|Say {v} at the {e}.",
          "What is the password of the {e}?|Which password does the {e} have?|What is the password for the {e}?", "The password of the {e} is {v}."),
    _kind("key", _spot, place, "Key of the {e}: in the {v}.|Look in the {v} for the key to the {e}.",
          "Where is the key to the {e}?|Where is the key of the {e}?|Where do I find the key to the {e}?", "The key to the {e} is in the {v}."),
    _kind("floor", place, _digits(1, 1, 2), "Floor of the {e}: {v}.|To reach the {e}, go up to floor {v}.",
          "On which floor is the {e}?|Which floor is the {e} on?|Where is the {e}?", "The {e} is on floor {v}."),
    _kind("chairs", place, _digits(1, 2, 3), "Chairs in the {e}: {v}.|The {e} has {v} chairs.",
          "How many chairs are in the {e}?|How many chairs does the {e} have?", "There are {v} chairs in the {e}."),
    _kind("people", place, _digits(1, 2, 3), "Limit for the {e}: {v} people.|The {e} holds up to {v} people.",
          "How many people may enter the {e}?|How many people fit in the {e}?|What is the limit for the {e}?", "At most {v} people may enter the {e}."),
    _kind("paint", _spot, _one_of(COLORS), "Color of the {e}: {v}.|They painted the {e} {v}.",
          "What color is the {e}?|Which color does the {e} have?|What is the color of the {e}?", "The {e} is painted {v}."),
    _kind("likes", _anyone, _one_of(FOODS, ITEMS), "Favorite of {e}: {v}.|What {e} likes best is {v}.",
          "What does {e} like?|What does {e} like best?|What is the favorite of {e}?", "{e} likes {v} best."),
    _kind("birthday", _anyone, _date, "Birthday of {e}: {v}.|On {v}, {e} has a birthday.|{e} was born on {v}.",
          "When is the birthday of {e}?|When is {e}'s birthday?|When was {e} born?", "The birthday of {e} is {v}."),
    _kind("pet", _anyone, coined, "{e} has a pet called {v}.|Pet of {e}: {v}.",
          "What is the name of {e}'s pet?|What is the pet of {e} called?", "The pet of {e} is called {v}."),
    _kind("animal", coined, _one_of(words.ANIMALS), "Our {v} is named {e}.|{e}, the {v}, lives here.",
          "What kind of animal is {e}?|Which animal is {e}?|What is {e}?", "{e} is a {v}."),
    _kind("loan", _item, _digits(1, 2), "Loan time of the {e}: {v} days.|Bring the {e} back after {v} days.",
          "For how many days can I borrow the {e}?|How long can I borrow the {e}?", "You can borrow the {e} for {v} days."),
    _kind("bus", place, _digits(1, 2, 3), "Bus to the {e}: {v}.|Take bus {v} to the {e}.",
          "Which bus goes to the {e}?|How do I get to the {e}?", "Bus {v} goes to the {e}."),
    _kind("built", _spot, _year, "Year of the {e}: {v}.|In {v} they built the {e}.",
          "When was the {e} built?|In which year was the {e} built?|How old is the {e}?", "The {e} was built in {v}."),
    _kind("founded", _group, _anyone, "{v} founded the {e}.|Founder of the {e}: {v}.",
          "Who founded the {e}?|Who is the founder of the {e}?", "The {e} was founded by {v}."),
    _kind("shelf", _item, _digits(1, 2, 3), "Shelf of the {e}: {v}.|Look for the {e} on shelf {v}.",
          "Where is the {e}?|On which shelf is the {e}?|Where can I find the {e}?", "The {e} is on shelf {v}."),
    _kind("weight", _item, _digits(1, 2, 3), "Weight of the {e}: {v} kilograms.|With {v} kilograms, the {e} is in the list.",
          "How heavy is the {e}?|How much does the {e} weigh?|What is the weight of the {e}?", "The {e} weighs {v} kilograms."),
    _kind("made", _item, _one_of(words.MATERIALS), "Material of the {e}: {v}.|They used {v} for the {e}.",
          "What is the {e} made of?|Which material is the {e} made of?", "The {e} is made of {v}."),
    _kind("distance", place, _digits(2, 3, 4), "Way to the {e}: {v} meters.|Walk {v} meters to the {e}.",
          "How far is the {e}?|How far away is the {e}?|How many meters is it to the {e}?", "It is {v} meters to the {e}."),
    _kind("job", _anyone, _duty, "Task of {e}: {v}.|On duty, {e} has to {v}.",
          "What must {e} do?|What is the task of {e}?|What is the job of {e}?", "{e} must {v}."),
    _kind("event", _event, _action, "If there is a {e}, {v}.|What to do when you see a {e}: {v}.",
          "What should I do in case of a {e}?|What do I do if there is a {e}?", "In case of a {e}, {v}."),
    _kind("wifi", _spot, _secret, "Wifi in the {e}: {v}.|In the {e}, use the network {v}.",
          "What is the wifi of the {e}?|Which network is in the {e}?|What is the wifi in the {e}?", "The wifi of the {e} is {v}."),
    _kind("label", _thing, _digits(2, 3, 4), "Number of the {e}: {v}.|{v} stands for the {e}.",
          "What is the number of the {e}?|Which number has the {e}?", "The number of the {e} is {v}."),
    _kind("symbol", coined, _one_of(THINGS, words.ANIMALS), "Symbol of {e}: a {v}.|A {v} stands for {e}.",
          "What is the symbol of {e}?|Which symbol does {e} have?", "The symbol of {e} is a {v}."),
    _kind("home", coined, place, "Home of {e}: the {v}.|{e} lives in the {v}.",
          "Where does {e} live?|Where is {e}?|Where is the home of {e}?", "{e} lives in the {v}."),
    _kind("mayor", coined, _anyone, "{v} is the head of {e}.|Head of {e}: {v}.",
          "Who is the head of {e}?|Who leads {e}?", "The head of {e} is {v}."),
    _kind("cost", _food, _price, "Price of {e}: {v}.|You pay {v} for {e}.|For {e} we ask {v}.",
          "How much is {e}?|What does {e} cost?|How much does {e} cost?|What is the price of {e}?", "{e} costs {v}."),
    _kind("when", _meeting, _when, "The {e} takes place {v}.|Come to the {e} {v}.|{v} there is the {e}.",
          "When is the {e}?|When does the {e} take place?|When does the {e} start?", "The {e} is {v}."),
    _kind("where", _meeting, _room, "Place of the {e}: {v}.|Come to {v} for the {e}.|The {e} is in {v}.",
          "Where is the {e}?|Where does the {e} take place?|In which room is the {e}?", "The {e} takes place in {v}."),
    _kind("lies", _item, _room, "You find the {e} in {v}.|Look for the {e} in {v}.|We keep the {e} in {v}.",
          "Where is the {e}?|Where can I find the {e}?|Where do you keep the {e}?", "The {e} is in {v}."),
    _kind("rule", _crowd, _rule, "Rule for {e}: {v}.|All {e} have to {v}.|Here {e} must {v}.",
          "What must {e} do?|What do {e} have to do?|What is the rule for {e}?", "{e} must {v}."),
    _kind("fact", _attribute, _anything, "{e}: {v}.|{v} is the {e}.|As the {e} we chose {v}.|The {e} is {v}.|The {e} = {v}",
          "What is the {e}?|Tell me the {e}.|What do you know about the {e}?|Which is the {e}?|Can you tell me the {e}?", "The {e} is {v}."),
)  # fmt: skip
PAIRS = (  # templates of sentences that state two facts about one entity: (kind of {v}, kind of {w}, template)
    ("opens", "closes", "The {e} opens at {v} and closes at {w}."), ("opens", "closes", "The {e} is open from {v} to {w}."),
    ("opens", "closes", "Opening hours of the {e}: {v} to {w}."), ("opens", "closes", "{e}: open {v} - {w}."),
    ("when", "where", "The {e} is {v} in {w}."), ("when", "where", "The {e} takes place {v} in {w}."),
    ("where", "when", "Come to {v} {w} for the {e}."), ("day", "meets", "The {e} meets on {v} in {w}."),
    ("meets", "day", "The {e} meets in {v} every {w}."), ("day", "leads", "On {v}, {w} leads the {e}."),
    ("leads", "meets", "{v} leads the {e} in {w}."), ("made", "price", "The {e} is made of {v} and costs {w}."),
    ("leads", "founded", "The {e}, founded by {w}, is led by {v}."), ("floor", "chairs", "On floor {v} is the {e} with {w} chairs."),
)  # fmt: skip
