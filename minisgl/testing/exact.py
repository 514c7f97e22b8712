"""Promise 8 in equal bits: runs the real scheduler over a real engine with random compositions of requests.

`Exactness` knows the tokens and log-probabilities of each of its requests alone, computed in one chunk with a cold
cache. In a `Composition`, some of them run together, and each must get the same numbers, bit for bit. This module needs
the package `hypothesis`, like the tests.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import strategies as st

from minisgl.config import Config
from minisgl.core import LogprobsEntry, SamplingParams
from minisgl.engine.build import start_engine
from minisgl.options.compose import compose
from minisgl.plugin_manager.manager import PluginManager
from minisgl.scheduler.build import build_scheduler
from minisgl.testing.idle import check_idle

__all__ = ["CHOICES", "Answer", "Composition", "Exactness", "compositions", "example_requests"]

CHOICES = (
    ("cache=radix", "scheduler=prefill_first", "speculation=none"),
    ("cache=radix", "scheduler=mixed", "speculation=ngram"),
    ("cache=naive", "scheduler=mixed", "speculation=none"),
    ("cache=radix", "scheduler=decode_first", "speculation=suffix"),
    ("cache=naive", "scheduler=prefill_first", "speculation=ngram"),
)
"""Options that change what is computed together, and in which order."""


@dataclass
class Answer:
    """What a request got: its tokens, their log-probabilities, and those of its prompt's tokens."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[LogprobsEntry] = field(default_factory=list)
    prompt_logprobs: list[LogprobsEntry] = field(default_factory=list)


@dataclass(frozen=True)
class Composition:
    """Requests that run together. ``choice`` is an index into `CHOICES`.

    ``jobs`` are (number of the request, the turn of the scheduler's loop before which it arrives, and the turn before
    which it is aborted, if any).
    """

    jobs: tuple[tuple[int, int, int | None], ...]
    choice: int = 0
    overlap: bool = True
    max_prefill_tokens: int = 8192


def compositions(requests: int) -> st.SearchStrategy[Composition]:
    """Generate compositions of two or more of ``requests`` requests. A request may be in a composition twice."""
    abort = st.one_of(st.none(), st.none(), st.integers(4, 16))
    job = st.tuples(st.integers(0, requests - 1), st.integers(0, 10), abort)
    return st.builds(
        Composition,
        jobs=st.lists(job, min_size=2, max_size=8).map(tuple),
        choice=st.integers(0, len(CHOICES) - 1),
        overlap=st.booleans(),
        max_prefill_tokens=st.sampled_from([7, 16, 50, 8192]),
    )


def example_requests(scale: int = 1) -> list[tuple[list[int], SamplingParams]]:
    """Return 12 prompts of 1 to 60 tokens below 300, some with a common beginning, and parameters of all kinds.

    Prompts and answers are ``scale`` times as long.
    """
    rng = random.Random(0)
    common = [rng.randrange(300) for _ in range(33 * scale)]
    kinds = [
        {"temperature": 0.0, "logprobs": 2},
        {"temperature": 0.8, "seed": 1, "logprobs": 0},
        {"temperature": 1.3, "seed": 2, "logprobs": 4, "top_k": 20, "top_p": 0.9},
        {"temperature": 0.0, "logprobs": 1, "prompt_logprobs": 2},
        {"temperature": 1.0, "seed": 3, "min_p": 0.02, "logprobs": 20},
        {"temperature": 0.0, "logprobs": 1, "repetition_penalty": 1.3, "presence_penalty": 0.4},
    ]
    made = []
    for number in range(12):
        own = [rng.randrange(300) for _ in range(rng.choice([1, 3, 17, 40]) * scale)]
        prompt = common[: rng.choice([16, 33]) * scale] + own if number % 3 else own
        more = {"max_tokens": rng.choice([1, 4, 9, 24]) * scale, "ignore_eos": True, **kinds[number % len(kinds)]}
        made.append((prompt[: 60 * scale], SamplingParams(**more)))  # type: ignore[arg-type]
    return made


class Exactness:
    """An engine with the options ``words``, and requests whose answers alone are known.

    ``requests`` are prompts, as token ids, and sampling parameters: greedy, or with a seed. `seen` counts what happened
    in all compositions, so that a test can see that there were retractions, cached tokens and accepted drafts.
    """

    def __init__(self, words: Sequence[str], requests: Sequence[tuple[Sequence[int], SamplingParams]]):
        self.requests, self.seen = requests, Counter[str]()
        self.manager = PluginManager.load()
        self._configs = [compose(self.manager, [*words, *choice]) for choice in CHOICES]
        self.engine = start_engine(self._configs[0], self.manager)
        try:
            alone = [self.run(Composition(((number, 0, None),), overlap=False)) for number in range(len(requests))]
        except BaseException:
            self.close()
            raise
        self.alone = [answer for (answer,) in alone]
        self.seen.clear()

    def close(self) -> None:
        """End the engine and its ranks."""
        self.manager.close()
        self.engine.close()

    def run(self, composition: Composition) -> list[Answer | None]:
        """Run a composition with a cold cache. Return the answer of each job, or None if it was aborted."""
        config: Config = replace(
            self._configs[composition.choice],
            overlap=composition.overlap,
            max_prefill_tokens=composition.max_prefill_tokens,
        )
        scheduler = build_scheduler(config, self.manager, self.engine, adapt_drafts=False)
        answers = [Answer() for _ in composition.jobs]
        ended: dict[int, str] = {}
        turn = 0
        while turn <= max(arrive for _, arrive, _ in composition.jobs) or scheduler.has_work:
            for uid, (number, arrive, abort) in enumerate(composition.jobs):
                if arrive == turn:
                    scheduler.add_request(uid, *self.requests[number])
                elif abort is not None and arrive < abort == turn:
                    scheduler.abort_request(uid)
            output = scheduler.step()
            for i, (uid, token) in enumerate(zip(output.uids, output.tokens, strict=True)):
                answers[uid].tokens.append(token)
                if i in output.logprobs:
                    answers[uid].logprobs.append(output.logprobs[i])
            for uid, entries in output.prompt_logprobs.items():
                answers[uid].prompt_logprobs += entries
            for end in output.finished:
                ended[end.uid] = end.finish_reason
                self.seen["cached tokens"] += end.cached_tokens
            turn += 1
        check_idle(scheduler)
        self._count(scheduler.stats())
        scheduler.close()
        return [None if ended[uid] == "abort" else answer for uid, answer in enumerate(answers)]

    def check(self, composition: Composition) -> None:
        """Run a composition. Raise AssertionError if a bit of an answer depends on the other requests (promise 8)."""
        for (number, *_), answer in zip(composition.jobs, self.run(composition), strict=True):
            if answer is not None:
                self.seen["answers"] += 1
                assert answer == self.alone[number], (
                    f"promise 8 is broken: request {number} got {answer}, and alone {self.alone[number]}"
                )

    def _count(self, stats: dict[str, Any]) -> None:
        for name in ("retractions", "accepted_draft_tokens"):
            self.seen[name] += stats.get(name, 0)
        self.seen["runs"] += 1
