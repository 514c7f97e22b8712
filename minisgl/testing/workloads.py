"""Hypothesis strategies for engines and clients: small pools, shared prefixes, hang-ups, stop ids, odd page sizes.

Knows what makes a scheduler stumble, not how one works. Needs `hypothesis`, as the tests do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from minisgl.core import EngineSpec, SamplingParams
from minisgl.testing.drive import Job, make_plugin
from minisgl.testing.truth import expected_output

CACHES = ("naive", "radix")
POLICIES = ("static", "prefill_first", "decode_first", "mixed")
ORDERS = ("fcfs", "lpm")
PAGE_SIZES = (1, 2, 3, 5, 7, 16, 64)


@dataclass(frozen=True)
class Setup:
    """An engine and how it is run; ``build()`` makes the cache, the policy and `Drive`'s options."""

    spec: EngineSpec
    cache: str
    policy: str
    order: str
    overlap: bool
    max_prefill_tokens: int
    starvation_steps: int
    eos_ids: tuple[int, ...]

    def build(self) -> tuple[EngineSpec, Any, Any, dict[str, Any]]:
        """``drive(jobs, spec, cache, policy, **options)``."""
        order = {} if self.policy == "static" else {"order": self.order}
        return (
            self.spec,
            make_plugin("cache", self.cache, page_size=self.spec.page_size),
            make_plugin("scheduler", self.policy, **order),
            {
                "overlap": self.overlap,
                "max_prefill_tokens": self.max_prefill_tokens,
                "starvation_steps": self.starvation_steps,
                "eos_ids": self.eos_ids,
            },
        )


@st.composite
def setups(draw: st.DrawFn, **fixed: Any) -> Setup:
    """Engines whose pool holds a few requests at most; ``fixed`` names fields of `Setup`, or ``page_size``."""
    page_size = fixed.pop("page_size", None) or draw(st.sampled_from(PAGE_SIZES))
    tokens = draw(st.integers(12, 100))
    num_pages = max(2, -(-tokens // page_size))
    spec = EngineSpec(
        page_size=page_size,
        num_pages=num_pages,
        max_running_requests=draw(st.integers(1, 6)),
        max_seq_len=draw(st.sampled_from([num_pages * page_size, num_pages * page_size + 8, 3 * page_size + 11])),
        vocab_size=draw(st.sampled_from([4, 12, 40])),
    )
    values: dict[str, Any] = {
        "spec": spec,
        "cache": draw(st.sampled_from(CACHES)),
        "policy": draw(st.sampled_from(POLICIES)),
        "order": draw(st.sampled_from(ORDERS)),
        "overlap": draw(st.booleans()),
        "max_prefill_tokens": draw(st.sampled_from([1, 3, 8, 16, 50, 8192])),
        "starvation_steps": draw(st.sampled_from([2, 16, 512])),
        "eos_ids": draw(st.sampled_from([(), (3,), (1, 2)])),
    }
    return Setup(**{**values, **fixed})


@st.composite
def params(draw: st.DrawFn, vocab_size: int, most_tokens: int) -> SamplingParams:
    """How one request samples and ends."""
    return SamplingParams(
        max_tokens=draw(st.integers(1, draw(st.sampled_from([2, 14, max(most_tokens, 1)])))),
        temperature=draw(st.sampled_from([0.0, 1.0])),
        seed=draw(st.sampled_from([None, 0, 7, -1])),
        stop_token_ids=draw(st.sampled_from([(), (0,), (vocab_size - 1,)])),
        ignore_eos=draw(st.booleans()),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, 0.5])),
    )


@st.composite
def jobs(draw: st.DrawFn, setup: Setup, most: int = 9, aborts: bool = True, legal: bool = False) -> list[Job]:
    """Clients that often share prefixes, by chance (three different tokens) and by intent: stems that several begin
    with, the same prompt again, and a second turn that contains the first one's answer. ``legal``: all fit."""
    spec = setup.spec
    room = min(spec.max_seq_len, spec.num_pages * spec.page_size)
    alphabet = st.integers(0, min(3, spec.vocab_size) - 1)
    stems = draw(st.lists(st.lists(alphabet, min_size=1, max_size=room), min_size=1, max_size=3))
    made: list[Job] = []
    for uid in range(1, draw(st.integers(1, most)) + 1):
        wanted = draw(params(spec.vocab_size, room - 1))
        longest = room - wanted.max_tokens if legal or draw(st.integers(0, 9)) else room + 2
        tail = draw(st.lists(alphabet, min_size=1, max_size=12))
        how = draw(st.sampled_from(["stem", "stem", "again", "turn", "alone"]))
        head: list[int] = []
        if how == "stem":
            stem = draw(st.sampled_from(stems))
            head = stem[: draw(st.integers(0, len(stem)))]
        elif how == "again" and made:
            head, tail = list(draw(st.sampled_from(made)).prompt), []
        elif how == "turn" and made:
            earlier = draw(st.sampled_from(made))
            head = [*earlier.prompt, *expected_output(earlier.ask, spec.vocab_size, setup.eos_ids).tokens]
        prompt = [*head, *tail][: max(longest, 1)]
        if legal and len(prompt) + wanted.max_tokens > room:
            continue
        arrive = draw(st.sampled_from([0, 0, 1, 4, 4, 9, 20]))  # often several at once
        abort = draw(st.none() | st.integers(0, 30)) if aborts else None
        made.append(Job(uid, prompt, wanted, arrive, None if abort is None else arrive + abort))
    return made
