"""Hypothesis strategies for engines and requests, chosen to reveal scheduler bugs.

They generate small pools, shared prefixes, aborted requests, stop ids and unusual page sizes. This module needs the
package `hypothesis`, like the tests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
from hypothesis import strategies as st

from minisgl.core import EngineSpec, SamplingParams
from minisgl.plugin_manager.discovery import exists
from minisgl.testing.drive import Job, make_plugin
from minisgl.testing.truth import expected_output

CACHES = ("naive", "radix")
POLICIES = ("static", "prefill_first", "decode_first", "mixed", "priority")
ORDERS = ("fcfs", "lpm")
PAGE_SIZES = (1, 2, 3, 5, 7, 16, 64)
DRAFTS = st.tuples(st.sampled_from([1, 4, 9]), st.sampled_from([0, 60, 90, 100]), st.integers(0, 99))
GRAMMARS = st.integers(0, 3)
HAS_DRAFTS, HAS_GRAMMARS = exists("minisgl.plugins.speculation"), exists("minisgl.plugins.constraint")
"""Whether the plugins are there that drafts and grammars need."""


@dataclass(frozen=True)
class Setup:
    """The sizes of an engine, the names of a cache and a policy, and the scheduler's options."""

    spec: EngineSpec
    cache: str
    policy: str
    order: str
    overlap: bool
    max_prefill_tokens: int
    starvation_steps: int
    eos_ids: tuple[int, ...]
    drafts: tuple[int, int, int] | None = None
    rounds: int = 1

    def build(self) -> tuple[EngineSpec, Any, Any, dict[str, Any]]:
        """Build the arguments (spec, cache, policy, options) for ``drive(jobs, spec, cache, policy, **options)``."""
        order = {} if self.policy in ("static", "priority") else {"order": self.order}
        return (
            self.spec,
            make_plugin("cache", self.cache, page_size=self.spec.page_size),
            make_plugin("scheduler", self.policy, **order),
            {
                "overlap": self.overlap,
                "max_prefill_tokens": self.max_prefill_tokens,
                "starvation_steps": self.starvation_steps,
                "eos_ids": self.eos_ids,
                "drafts": self.drafts,
                "rounds": self.rounds,
                "full_drafts": self.rounds > 2,
            },
        )


@st.composite
def setups(draw: st.DrawFn, /, **fixed: Any) -> Setup:
    """Draw a `Setup` whose pool holds only a few requests.

    ``fixed`` gives values of fields of `Setup`, or of ``page_size``, which are then not drawn.
    """
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
        "drafts": draw(st.none() | DRAFTS if HAS_DRAFTS else st.none()),
        "rounds": draw(st.sampled_from([1, 2, 5])),
    }
    return Setup(**{**values, **fixed})


@st.composite
def params(draw: st.DrawFn, vocab_size: int, max_output: int) -> SamplingParams:
    """Draw sampling parameters with ``max_tokens`` of at most 14 or ``max_output``, whichever is larger."""
    return SamplingParams(
        max_tokens=draw(st.integers(1, draw(st.sampled_from([2, 14, max(max_output, 1)])))),
        temperature=draw(st.sampled_from([0.0, 1.0])),
        seed=draw(st.sampled_from([None, 0, 7, -1])),
        stop_token_ids=draw(st.sampled_from([(), (0,), (vocab_size - 1,)])),
        ignore_eos=draw(st.booleans()),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, 0.5])),
        logprobs=draw(st.sampled_from([None, None, 0])),
        prompt_logprobs=draw(st.sampled_from([None, None, None, 0])),
        logprob_start_len=draw(st.sampled_from([0, 0, 5, 30])),
        cache_salt=draw(st.sampled_from([None, None, "salt", "pepper"])),
    )


@st.composite
def jobs(draw: st.DrawFn, setup: Setup, max_jobs: int = 9, aborts: bool = True, must_fit: bool = False) -> list[Job]:
    """Draw up to ``max_jobs`` requests, many of which share prefixes.

    Prefixes are shared by chance, because prompts use at most three different tokens, and on purpose: several prompts
    begin with the same tokens, a prompt is repeated, or a prompt contains an earlier prompt and its answer (a second
    turn of a chat). With ``aborts``, some requests are aborted. With ``must_fit``, every request fits into the pool;
    otherwise some may be too long, and the scheduler must reject those.
    """
    spec = setup.spec
    room = min(spec.max_seq_len, spec.num_pages * spec.page_size)
    alphabet = st.integers(0, min(3, spec.vocab_size) - 1)
    stems = draw(st.lists(st.lists(alphabet, min_size=1, max_size=room), min_size=1, max_size=3))
    made: list[Job] = []
    for uid in range(1, draw(st.integers(1, max_jobs)) + 1):
        sampling = draw(params(spec.vocab_size, room - 1))
        if setup.policy == "priority":
            sampling = msgspec.structs.replace(sampling, priority=draw(st.sampled_from([0, 0, -1, 2])))
        longest = room - sampling.max_tokens if must_fit or draw(st.integers(0, 9)) else room + 2
        tail = draw(st.lists(alphabet, min_size=1, max_size=12))
        kind = draw(st.sampled_from(["stem", "stem", "repeat", "turn", "alone"]))
        head: list[int] = []
        if kind == "stem":
            stem = draw(st.sampled_from(stems))
            head = stem[: draw(st.integers(0, len(stem)))]
        elif kind == "repeat" and made:
            head, tail = list(draw(st.sampled_from(made)).prompt), []
        elif kind == "turn" and made:
            earlier = draw(st.sampled_from(made))
            answer = expected_output(earlier.request, spec.vocab_size, setup.eos_ids)
            head = [*earlier.prompt, *answer.tokens]
        prompt = [*head, *tail][: max(longest, 1)]
        if must_fit and len(prompt) + sampling.max_tokens > room:
            continue
        arrive = draw(st.sampled_from([0, 0, 1, 4, 4, 9, 20]))  # repeated values: several requests arrive at once
        abort = draw(st.none() | st.integers(0, 30)) if aborts else None
        grammar = draw(st.none() | GRAMMARS if HAS_GRAMMARS else st.none())
        group = draw(st.sampled_from([0, 0, 0, 1, 2]))
        made.append(Job(uid, prompt, sampling, arrive, None if abort is None else arrive + abort, grammar, group))
    return made
