"""The workload of the course: a class asks questions about three handbooks, and two long prompts arrive in between.

The stages, the pictures and the chapters all use this workload, so that their counts can be compared. Its prompts are
token ids of the model `tutor`.
"""

from __future__ import annotations

import random
from typing import NamedTuple

from minisgl.bench.workload import SampleRequest
from minisgl.chapters.tutor.handbook import Handbook, write
from minisgl.models.resolve import resolve_model
from minisgl.tokenizer.tokenizer import Tokenizer

HANDBOOKS, HANDBOOK_TOKENS, QUESTIONS = 3, 384, 42
LONG_TOKENS, LONG_OUTPUT = 1200, 24
OUTPUTS = (6, 9, 12, 7, 10, 96, 8)
"""Output lengths in tokens, used in turn: six short ones, and one that lasts as long as two batches of short ones."""
LESSONS, LONG_AT = (0, 20, 40), (10, 30)
"""Steps before which a third of the class asks at once, and steps before which a long prompt arrives."""


class Arrival(NamedTuple):
    """One request, and the step before which the request arrives."""

    step: int
    request: SampleRequest
    question: str
    """The text of the question, without its handbook."""


def workload(seed: int = 0) -> list[Arrival]:
    """Return the 44 requests by arrival. Their output lengths are exact if ``ignore_eos`` is set."""
    tokenizer = Tokenizer.from_dir(resolve_model("tutor"))
    assert tokenizer is not None
    rng = random.Random(seed)
    books = [_handbook(rng, tokenizer) for _ in range(HANDBOOKS)]
    lesson = QUESTIONS // len(LESSONS)
    found = []
    for i in range(QUESTIONS):
        book = books[i % HANDBOOKS]
        question = rng.choice(book.known).ask(rng)
        request = SampleRequest(_prompt(tokenizer, book, question), OUTPUTS[i % len(OUTPUTS)])
        found.append(Arrival(LESSONS[i // lesson], request, question))
    for step in LONG_AT:
        ids, question = _long(rng, tokenizer)
        found.append(Arrival(step, SampleRequest(ids, LONG_OUTPUT), question))
    return sorted(found, key=lambda arrival: arrival.step)


def without_cache(requests: list[SampleRequest]) -> int:
    """Return the number of tokens that a server without KV cache computes: the whole text for each output token."""
    return sum(len(request.prompt_ids) + i for request in requests for i in range(request.output_len))


def _prompt(tokenizer: Tokenizer, book: Handbook, question: str) -> list[int]:
    return tokenizer.chat([{"role": "system", "content": book.text}, {"role": "user", "content": question}])


def _handbook(rng: random.Random, tokenizer: Tokenizer) -> Handbook:
    """Return a handbook such that prompts about it share exactly `HANDBOOK_TOKENS` tokens: a whole number of pages."""
    while True:
        book = _write(rng, tokenizer, HANDBOOK_TOKENS - rng.randint(0, 10))
        one, other = (_prompt(tokenizer, book, question) for question in ("A", "B"))
        if [a == b for a, b in zip(one, other, strict=True)].index(False) == HANDBOOK_TOKENS:
            return book


def _long(rng: random.Random, tokenizer: Tokenizer) -> tuple[list[int], str]:
    """Return a prompt of exactly `LONG_TOKENS` tokens about a handbook of its own, and the question."""
    while True:
        book = _write(rng, tokenizer, LONG_TOKENS - rng.randint(12, 28))
        question = rng.choice(book.known).ask(rng)
        ids = _prompt(tokenizer, book, question)
        if len(ids) == LONG_TOKENS:
            return ids, question


def _write(rng: random.Random, tokenizer: Tokenizer, tokens: int) -> Handbook:
    return write(rng, "heldout", tokens, lambda text: len(tokenizer.encode(text)), titled=True)
