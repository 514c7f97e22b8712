"""The hidden traces of a match: requests that a file can't know, because the seed is drawn when the match begins.

A trace has times in seconds of a calculated clock. Two requests with the same ``stem`` have the same first tokens.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

__all__ = ["KINDS", "Ask", "Trace", "traces_of"]


@dataclass(frozen=True)
class Ask:
    """A request that arrives at ``at`` s: ``shared`` tokens of the text ``stem``, ``own`` tokens, and the answer."""

    uid: int
    at: float
    stem: int
    shared: int
    own: int
    answer: int
    priority: int = 0


@dataclass(frozen=True)
class Trace:
    """Requests, and the sizes of the engine that serves them: pages of 16 tokens, rows, and tokens of a step."""

    name: str
    says: str
    asks: list[Ask] = field(default_factory=list)
    pages: int = 480
    rows: int = 16
    chunk: int = 512


def _times(rng: random.Random, count: int, rate: float) -> list[float]:
    """Return Poisson arrivals: ``count`` times at ``rate`` requests per second."""
    now, found = 0.0, []
    for _ in range(count):
        now += rng.expovariate(rate)
        found.append(now)
    return found


def _chat(rng: random.Random, count: int = 56, rate: float = 30.0, first: int = 1) -> list[Ask]:
    times = _times(rng, count, rate)
    return [Ask(first + i, at, 0, 0, rng.randint(20, 400), rng.randint(8, 60)) for i, at in enumerate(times)]


def chat(rng: random.Random) -> Trace:
    """Short and middle prompts, one after another."""
    return Trace("chat", "56 prompts of 20 to 400 tokens, about 30 a second", _chat(rng))


def documents(rng: random.Random) -> Trace:
    """Long prompts between short ones."""
    asks = _chat(rng, 44)
    long = [Ask(900 + i, at, 0, 0, rng.randint(1200, 2200), rng.randint(4, 16))
            for i, at in enumerate(_times(rng, 5, 4.0))]  # fmt: skip
    return Trace(
        "documents", "44 short prompts, and 5 of 1,200 to 2,200 tokens", sorted(asks + long, key=lambda a: a.at)
    )


def lesson(rng: random.Random) -> Trace:
    """Let a class ask at once, several times, about a few handbooks."""
    asks = [
        Ask(1 + i, 0.5 * (i // 12), rng.randrange(3), 384, rng.randint(8, 40), rng.randint(6, 30)) for i in range(48)
    ]
    return Trace("lesson", "4 times 12 questions at once, about 3 handbooks of 384 tokens", asks)


def tight(rng: random.Random) -> Trace:
    """Long answers in a small pool, so that requests are retracted."""
    times = _times(rng, 24, 40.0)
    asks = [Ask(1 + i, at, 0, 0, rng.randint(16, 120), rng.randint(60, 160)) for i, at in enumerate(times)]
    return Trace("tight", "24 long answers in a pool of 64 pages", asks, pages=64)


def classes(rng: random.Random) -> Trace:
    """People who wait, and documents that need not be done soon. A policy with priorities is told which is which."""
    asks = _chat(rng, 40, 24.0)
    batch = [Ask(900 + i, 0.0, 0, 0, rng.randint(700, 1500), rng.randint(10, 30), 1) for i in range(8)]
    return Trace(
        "classes", "8 documents that arrive first, and 40 prompts of people", sorted(asks + batch, key=lambda a: a.at)
    )


def handbooks(rng: random.Random) -> Trace:
    """More handbooks than the pool holds, some of them asked for often."""
    asks = []
    for i, at in enumerate(_times(rng, 90, 12.0)):
        stem = min(int(rng.expovariate(0.35)), 11)
        asks.append(Ask(1 + i, at, stem, 480, rng.randint(4, 60), rng.randint(4, 16)))
    return Trace("handbooks", "90 questions about 12 handbooks of 480 tokens, in a pool of 200 pages", asks, 200, 4)


def scans(rng: random.Random) -> Trace:
    """Questions about a few handbooks, between long prompts that never come again."""
    asks = []
    for i, at in enumerate(_times(rng, 60, 10.0)):
        if i % 3 == 2:
            asks.append(Ask(1 + i, at, 0, 0, rng.randint(800, 1400), rng.randint(4, 12)))
        else:
            asks.append(Ask(1 + i, at, rng.randrange(4), 384, rng.randint(8, 40), rng.randint(4, 12)))
    return Trace("scans", "questions about 4 handbooks, between long prompts, in a pool of 200 pages", asks, 200, 4)


def turns(rng: random.Random) -> Trace:
    """Conversations whose prompts grow: each turn begins with all that was said before."""
    said = dict.fromkeys(range(10), 96)
    asks = []
    for i, at in enumerate(_times(rng, 70, 12.0)):
        who = rng.randrange(10)
        own, answer = rng.randint(12, 60), rng.randint(8, 24)
        asks.append(Ask(1 + i, at, who, said[who], own, answer))
        said[who] = min(said[who] + own + answer, 1200)
    return Trace("turns", "10 conversations whose prompts grow, in a pool of 240 pages", asks, 240, 4)


Maker = Callable[[random.Random], Trace]
KINDS: Mapping[str, tuple[Maker, ...]] = MappingProxyType(
    {"policy": (chat, documents, lesson, tight, classes), "cache": (handbooks, scans, turns)}
)
"""What plays → its traces."""


def traces_of(kind: str, seed: int) -> list[Trace]:
    """Return the traces of a match. They depend only on the kind and on the seed."""
    return [make(random.Random(f"{seed} {make.__name__}")) for make in KINDS[kind]]
