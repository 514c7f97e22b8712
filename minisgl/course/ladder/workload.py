"""The course's one workload: a class asks about three handbooks while two long prompts come in between.

The stages, the pictures and the chapters run it, so that their counts can be set side by side. Knows `tutor`'s
handbooks and its tokenizer, and no engine.
"""

from __future__ import annotations

import random
from typing import NamedTuple

from minisgl.bench.workload import Ask
from minisgl.course.tutor.handbook import Handbook, write
from minisgl.models.resolve import resolve_model
from minisgl.tokenizer.tokenizer import Tokenizer

HANDBOOKS, HANDBOOK_TOKENS, QUESTIONS = 3, 384, 42
LONG_TOKENS, LONG_OUTPUT = 1200, 24
OUTPUTS = (6, 9, 12, 7, 10, 96, 8)
"""Answer lengths in tokens, in turns: six short ones, and one that runs as long as two batches of them."""
LESSONS, LONG_AT = (0, 20, 40), (10, 30)
"""The steps before which a third of the class asks at once, and before which a long prompt comes."""


class Arrival(NamedTuple):
    """One request, and the step before which it comes."""

    step: int
    ask: Ask
    text: str
    """The question, without its handbook."""


def workload(seed: int = 0) -> list[Arrival]:
    """The 44 requests by arrival: `tutor`'s token ids, and answer lengths (exact, with ``ignore_eos``)."""
    tokenizer = Tokenizer.from_dir(resolve_model("tutor"))
    assert tokenizer is not None
    rng = random.Random(seed)
    books = [_handbook(rng, tokenizer) for _ in range(HANDBOOKS)]
    lesson = QUESTIONS // len(LESSONS)
    found = []
    for i in range(QUESTIONS):
        book = books[i % HANDBOOKS]
        question = rng.choice(book.known).ask(rng)
        ask = Ask(_prompt(tokenizer, book, question), OUTPUTS[i % len(OUTPUTS)])
        found.append(Arrival(LESSONS[i // lesson], ask, question))
    for step in LONG_AT:
        ids, question = _long(rng, tokenizer)
        found.append(Arrival(step, Ask(ids, LONG_OUTPUT), question))
    return sorted(found, key=lambda arrival: arrival.step)


def without_cache(asks: list[Ask]) -> int:
    """Tokens that a server without a KV cache computes: the whole text again for each token of an answer."""
    return sum(len(ask.prompt) + i for ask in asks for i in range(ask.output))


def _prompt(tokenizer: Tokenizer, book: Handbook, question: str) -> list[int]:
    return tokenizer.chat([{"role": "system", "content": book.text}, {"role": "user", "content": question}])


def _handbook(rng: random.Random, tokenizer: Tokenizer) -> Handbook:
    """A handbook of which all questions share exactly `HANDBOOK_TOKENS`: a whole number of pages."""
    while True:
        book = _write(rng, tokenizer, HANDBOOK_TOKENS - rng.randint(0, 10))
        one, other = (_prompt(tokenizer, book, question) for question in ("A", "B"))
        if [a == b for a, b in zip(one, other, strict=True)].index(False) == HANDBOOK_TOKENS:
            return book


def _long(rng: random.Random, tokenizer: Tokenizer) -> tuple[list[int], str]:
    """A prompt of exactly `LONG_TOKENS` on a handbook of its own, and its question."""
    while True:
        book = _write(rng, tokenizer, LONG_TOKENS - rng.randint(12, 28))
        question = rng.choice(book.known).ask(rng)
        ids = _prompt(tokenizer, book, question)
        if len(ids) == LONG_TOKENS:
            return ids, question


def _write(rng: random.Random, tokenizer: Tokenizer, tokens: int) -> Handbook:
    return write(rng, "heldout", tokens, lambda text: len(tokenizer.encode(text)), titled=True)
