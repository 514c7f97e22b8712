"""The text that `tutor` is trained on, and the held-out text that it is scored on.

This module and the modules beside it generate all text deterministically from a seed: `conversation` makes one training
conversation of a domain, `exam` makes held-out questions of a family. Training text and held-out text do not overlap:
sums are split by the pair of summands, handbooks by their entities and values, exercises by their content, and the
glossary by the phrasing of the question. This module knows text only; `packing` turns text into tokens.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from minisgl.chapters.tutor import chatter, exercises, glossary, handbook, offscript, phrasings
from minisgl.chapters.tutor.words import Split, chance, invent

SHARES = {"handbook": 35, "drill": 20, "sum": 15, "glossary": 15, "chance": 5, "talk": 10}
"""Percentage of the training tokens that each domain gets."""

CHARACTERS_PER_TOKEN = 2.8
"""Approximate characters per token of handbooks, with which a length in tokens is converted to characters."""

Exchange = tuple[str, str]


@dataclass(frozen=True)
class Turn:
    """A user message and the answer that the model should give, with their family of exercises."""

    user: str
    answer: str
    family: str


@dataclass(frozen=True)
class Conversation:
    """An optional system message and some turns. If ``raw``, one turn as plain text without the chat template."""

    turns: tuple[Turn, ...]
    system: str | None = None
    raw: bool = False


@dataclass(frozen=True)
class Question:
    """One held-out question: its messages, of which the last is the question, the only right answer, and tools."""

    family: str
    messages: tuple[dict[str, Any], ...]
    answer: str
    tools: tuple[dict[str, Any], ...] = ()


_SYSTEMS = (
    "You are a helpful assistant.", "You are tutor, a small language model.", "Answer briefly.", "Be polite.",
    "You are a friendly teacher.", "You are a helpful AI assistant. Answer the user's questions.", "Be concise.",
    "You are an assistant that helps students to understand LLM serving.", "Answer in one sentence.",
    "You are an expert.",
    "You are a chatbot.", "Please help the user.", "You answer questions about LLM serving.", "Help the students.",
)  # fmt: skip
_BOOK_IN_SYSTEM = (
    "{b}", "{b}", "Answer from this handbook.\n\n{b}", "Use the handbook to answer.\n\n{b}", "Handbook:\n{b}",
    "You answer questions about this handbook:\n\n{b}", "You are a helpful assistant. This is the handbook:\n{b}",
    "You are a helpful assistant. Answer the questions with the help of this text.\n\n{b}",
)  # fmt: skip
_BOOK_IN_USER = (
    "{b}\n\n{q}", "{b}\n\n{q}", "{b}\n{q}", "{b}\n\nQuestion: {q}", "Handbook:\n{b}\n\nQuestion: {q}",
    "Handbook: {b} {q}",
    "Read this handbook.\n\n{b}\n\n{q}", "Here is a handbook:\n{b}\n\n{q}", "Use this text:\n\n{b}\n\nNow answer: {q}",
    "Answer from the handbook.\n\n{b}\n\n{q}", "{b}\n---\n{q}", "Handbook: {b}\nQuestion: {q}", "{q}\n\n{b}",
    "Context:\n{b}\n\nQuestion: {q}\nAnswer:", "Here is some text. {b} Now my question: {q}",
)  # fmt: skip
_POLITE = ("Please ", "Please ", "Can you ", "Could you ", "Would you ", "I want you to ", "Can you please ")
_OPENERS = (
    "Hi! ",
    "Hello. ",
    "Hey, ",
    "Ok. ",
    "Now: ",
    "Next: ",
    "And ",
    "So ",
    "Tutor, ",
    "Hi tutor! ",
    "Thanks. ",
    "Well, ",
)
_CLOSERS = (" Please.", " please", ", please", " Thanks!", " Thank you.", " thanks")


def decorate(rng: random.Random, request: str, verbatim: bool = False) -> str:
    """Return the request varied as people type: with polite phrases, in any case, with or without punctuation.

    With ``verbatim``, only the beginning may change, so that a text to be copied stays as it is.
    """
    if chance(rng, 14) and (verbatim or request.endswith(".")):
        polite = rng.choice(_POLITE)
        request = polite + _small(request)
        if not verbatim and polite[0] in "CW":
            request = request[:-1] + "?"
    elif chance(rng, 8):
        opener = rng.choice(_OPENERS)
        request = opener + (request if opener.rstrip()[-1] in ".!:" else _small(request))
    if verbatim:
        return request
    if chance(rng, 5):
        request = request.rstrip(".?!") + rng.choice(_CLOSERS)
    elif chance(rng, 18):
        request = request.rstrip(".?!") or request
    elif chance(rng, 4):
        request += rng.choice(("!", "?", "??", "!!", " ", "...", " :)", "\n"))
    style = rng.random()
    if style < 0.14:
        return request.lower()
    if style < 0.16:
        return request.upper()
    return _typo(rng, request) if style < 0.19 else request


def _small(text: str) -> str:
    return text[:1].lower() + text[1:] if text[1:2].islower() or text[1:2] in " '" else text


def _typo(rng: random.Random, text: str) -> str:
    letters = [i for i in range(1, len(text) - 1) if text[i].isalpha()]
    if not letters:
        return text
    at = rng.choice(letters)
    return (
        text[:at] + rng.choice(("", text[at] * 2, text[at + 1] + text[at])) + text[at + (1 if chance(rng, 70) else 2) :]
    )


def _exchange(rng: random.Random, split: Split, family: str) -> Exchange:
    makers: dict[str, Callable[[], Exchange]] = {
        "count": lambda: exercises.count(rng, split),
        "copy": lambda: exercises.copy(rng, split),
        "sort": lambda: exercises.sort(rng, split),
        "sum": lambda: exercises.add(rng, split),
        "glossary": lambda: glossary.question(rng, split),
        "comparison": lambda: glossary.comparison(rng),
        "unknown": lambda: glossary.unknown(rng, split),
        "chance": lambda: exercises.play(rng),
        "talk": lambda: chatter.talk(rng),
        "fallback": lambda: offscript.off_script(rng, split),
    }
    return makers[family]()


def turn(rng: random.Random, split: Split, family: str) -> Turn:
    """Return one decorated exchange of a family. Training text never contains a held-out phrasing of a term."""
    while True:
        request, answer = _exchange(rng, split, family)
        request = decorate(rng, request, verbatim=family == "copy")
        if split == "heldout" or family not in ("glossary", "unknown") or not phrasings.looks_held_out(request):
            return Turn(request, answer, family)


_FAMILIES = {
    "drill": ("count", "count", "copy", "copy", "sort"),
    "sum": ("sum",),
    "glossary": ("glossary",) * 12 + ("unknown",) * 6 + ("comparison",) * 2,
    "chance": ("chance",),
    "talk": ("talk", "fallback", "fallback"),
}
_MIXED = (
    "count",
    "copy",
    "sort",
    "sum",
    "glossary",
    "glossary",
    "unknown",
    "talk",
    "talk",
    "fallback",
    "fallback",
    "chance",
)


def conversation(rng: random.Random, domain: str, tokens: int) -> Conversation:
    """Return a training conversation of a domain. One about a handbook has at most about ``tokens`` tokens."""
    if domain == "handbook":
        return _about_a_handbook(rng, "train", tokens)
    if chance(rng, 4):
        return Conversation((turn(rng, "train", rng.choice(_FAMILIES[domain])),), raw=True)
    families = _FAMILIES[domain]
    turns: list[Turn] = []
    if domain == "talk":
        kind = rng.randrange(10)
        if kind < 3:
            families = _MIXED
        elif kind == 3:
            (hello, greeting), (ask, name) = chatter.name_exchange(rng, "train")
            between = [turn(rng, "train", rng.choice(_MIXED)) for _ in range(rng.randint(0, 2))]
            turns = [Turn(hello, greeting, "talk"), *between, Turn(ask, name, "talk")]
    if not turns:
        turns = [turn(rng, "train", rng.choice(families)) for _ in range(rng.choice((1, 1, 2, 3, 4, 6)))]
    return Conversation(tuple(turns), system_text(rng))


def system_text(rng: random.Random) -> str | None:
    """Return a system message that changes no answer, or None for no system message."""
    if chance(rng, 65):
        return None
    if chance(rng, 70):
        return rng.choice(_SYSTEMS)
    role = rng.choice(
        ("a friendly teacher", "an assistant", "a chatbot", "an expert", "a guide", "a pirate", "a librarian")
    )
    return f"You are {invent(rng).capitalize()}, {role}. {rng.choice(_SYSTEMS)}"


def _book_length(rng: random.Random) -> int:
    """Return a random length in tokens for a training handbook. Many are short, because these teach fastest."""
    kind = rng.random()
    if kind < 0.3:
        return int(25 * 10 ** rng.random())
    if kind < 0.65:
        return int(100 * 10 ** rng.random())
    return rng.randint(300, 1800)


def _about_a_handbook(rng: random.Random, split: Split, tokens: int) -> Conversation:
    length = _book_length(rng)
    asked = rng.randint(1, max(2, min(12, length // 40)))
    length = max(25, min(length, tokens - 34 * asked - 20))
    book = handbook.write(rng, split, int(length * CHARACTERS_PER_TOKEN))
    facts = book.known
    if not facts:
        return _about_a_handbook(rng, split, tokens)
    turns: list[Turn] = []
    for fact in rng.sample(facts, min(asked, len(facts))):
        if chance(rng, 14):
            turns.append(Turn(decorate(rng, book.absent(rng)), handbook.ABSENT, "absent"))
        elif chance(rng, 4) and turns:
            turns.append(turn(rng, split, rng.choice(("talk", "sum", "glossary", "count", "fallback"))))
        else:
            turns.append(Turn(decorate(rng, fact.ask(rng)), fact.answer, "lookup"))
    text = book.text
    if len(text) < 400 and chance(rng, 30):
        text = text.replace("\n", " ")
    if chance(rng, 40):
        system: str | None = rng.choice(_BOOK_IN_SYSTEM).format(b=text)
    else:
        system = system_text(rng) if chance(rng, 50) else None
        turns[0] = Turn(rng.choice(_BOOK_IN_USER).format(b=text, q=turns[0].user), turns[0].answer, turns[0].family)
        if chance(rng, 3):
            return Conversation((turns[0],), raw=True)
    return Conversation(tuple(turns), system)


EXAMS = ("lookup", "variant", "absent", "sum", "count", "copy", "sort", "glossary", "unknown", "talk", "fallback")


def exam(family: str, size: int, seed: int = 0) -> list[Question]:
    """Return ``size`` held-out questions of one family, each with its only right answer.

    For ``unknown`` and ``fallback``, the answer is only the beginning of the right answers, which continue with one of
    several suggestions.
    """
    rng = random.Random(f"exam {family} {seed}")
    questions = []
    for i in range(size):
        if family in ("lookup", "variant", "absent"):
            questions.append(_handbook_question(rng, family, tokens=100 + 1700 * i // max(1, size - 1)))
            continue
        request, answer = _exchange(rng, "heldout", family)
        if family in ("unknown", "fallback") and not answer.startswith(("I have no", "I can only")):
            answer = answer.partition(" Try:")[0].partition("; try:")[0]
        questions.append(Question(family, ({"role": "user", "content": request},), answer))
    return questions


def _handbook_question(rng: random.Random, family: str, tokens: int) -> Question:
    """Return a question about a held-out handbook of about ``tokens`` tokens.

    Half of the handbooks are in a system message, the others in the user message.
    """
    book = handbook.write(rng, "heldout", int(tokens * CHARACTERS_PER_TOKEN), titled=True)
    if family == "variant":
        book, fact = book.variant(rng)
    else:
        fact = rng.choice(book.known)
    question = book.absent(rng) if family == "absent" else fact.ask(rng)
    answer = handbook.ABSENT if family == "absent" else fact.answer
    if chance(rng, 50):
        messages = ({"role": "system", "content": book.text}, {"role": "user", "content": question})
        return Question(family, messages, answer)
    return Question(family, ({"role": "user", "content": f"{book.text}\n\n{question}"},), answer)
