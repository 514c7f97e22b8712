"""The purpose of each policy, in exact counts on the simulated engine: computed tokens, and steps of waiting."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from minisgl.core import EngineSpec, SamplingParams
from minisgl.scheduler.base import Budget, Plan, Running, Waiting
from minisgl.testing.drive import Drive, Job, Report, make_plugin

SPEC = EngineSpec(page_size=4, num_pages=60, max_running_requests=4, max_seq_len=160, vocab_size=50)


def job(uid: int, length: int, answer: int, arrive: int = 0, first: int | None = None) -> Job:
    start = uid * 7 if first is None else first
    prompt = [(start + i * i) % SPEC.vocab_size for i in range(length)]
    return Job(uid, prompt, SamplingParams(max_tokens=answer, temperature=0.0), arrive)


def serve(policy: str, clients: list[Job], spec: EngineSpec = SPEC, cache: str = "radix", **options: Any) -> Report:
    order = options.pop("order", None)
    chosen = make_plugin("scheduler", policy, **({"order": order} if order else {}))
    return Drive(spec, make_plugin("cache", cache, page_size=spec.page_size), chosen, **options).run(clients)


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize(("policy", "order"), [("prefill_first", "fcfs"), ("decode_first", "fcfs"), ("mixed", "lpm")])
@pytest.mark.parametrize("chunk", [512, 8192])
def test_shared_prefix_is_computed_once(policy: str, order: str, chunk: int, together: bool) -> None:
    """256 requests share a prefix of 1,024 tokens; at most 2 % more prompt tokens are computed than necessary."""
    spec = EngineSpec(page_size=16, num_pages=2000, max_running_requests=256, max_seq_len=2048, vocab_size=1000)
    prefix = [(i * i) % 1000 for i in range(1024)]
    clients = [
        Job(uid, [*prefix, *((uid + 31 * i) % 1000 for i in range(16))], SamplingParams(max_tokens=2), arrive=arrive)
        for uid, arrive in ((uid, 0 if together else uid // 8) for uid in range(256))
    ]
    report = serve(policy, clients, spec, order=order, max_prefill_tokens=chunk, thorough=False)
    least = 1024 + 256 * 16
    assert least <= report.counts.prompt_tokens <= 1.02 * least


@pytest.mark.parametrize("policy", ["prefill_first", "decode_first", "mixed"])
def test_prompts_that_share_parts_of_one_cached_prompt(policy: str) -> None:
    """Several prompts share a part of one cached prompt and are admitted in one step.

    The lock of the first prompt splits the edge of the radix tree on which the match of the next prompt ends.
    """
    book = [i * i % 50 for i in range(32)]
    params = SamplingParams(max_tokens=4, temperature=0.0)
    heads = {2: book[:8], 3: book[:20], 4: book[:12], 5: book[:28]}
    clients = [Job(1, book, params), *(Job(uid, [*head, uid, 1, 2, 3], params, 9) for uid, head in heads.items())]
    # The same prefixes again: a prefix that was locked or inserted incorrectly gives a wrong answer now.
    again = [Job(uid + 10, [*head, uid, 1, 2, 3, 4, 5], params, 30) for uid, head in heads.items()]
    report = serve(policy, [*clients, *again])
    assert [report.finished[uid].cached_tokens for uid in heads] == [len(head) for head in heads.values()]
    assert [report.finished[uid + 10].cached_tokens for uid in heads] == [len(head) + 4 for head in heads.values()]


def test_longest_prefix_match() -> None:
    """Questions alternate between two handbooks, and the KV pool holds one handbook.

    In order of arrival, each question evicts the other handbook. With the longest prefix first, each handbook is
    computed once.
    """
    spec = EngineSpec(page_size=4, num_pages=18, max_running_requests=1, max_seq_len=72, vocab_size=50)
    books = [[(7 * b + i * i) % 50 for i in range(40)] for b in range(2)]
    params = SamplingParams(max_tokens=2, temperature=0.0)
    clients = [Job(uid, [*books[uid % 2], uid, uid, uid, uid], params) for uid in range(12)]
    inorder = serve("prefill_first", clients, spec, order="fcfs").counts.prompt_tokens
    longest = serve("prefill_first", clients, spec, order="lpm").counts.prompt_tokens
    assert longest == 2 * 40 + 12 * 4
    assert inorder > 2 * longest


def test_mixed_decodes_in_every_step() -> None:
    clients = [job(1, 4, 30), job(2, 100, 3, arrive=4), job(3, 4, 20, arrive=6)]
    mixed = serve("mixed", clients, max_prefill_tokens=8)
    assert mixed.worst_gap == 1
    assert mixed.counts.max_tokens <= 8
    assert serve("prefill_first", clients, max_prefill_tokens=8).worst_gap >= 12


def test_prefill_first_and_decode_first() -> None:
    clients = [job(1, 4, 30), job(2, 8, 3, arrive=5)]
    soon = serve("prefill_first", clients)
    late = serve("decode_first", clients)
    assert soon.first_token[2] <= 5 + 1
    assert 5 + 8 <= late.first_token[2] <= 5 + 8 + 2  # decode_first.patience is 8 steps
    assert late.worst_gap <= 2


def test_static_and_continuous_batching() -> None:
    """With static batching, request 5 waits for the first batch to end. Continuous batching needs half the steps."""
    clients = [job(uid, 4, 30 if uid % 4 == 1 else 3) for uid in range(1, 13)]
    static, continuous = serve("static", clients), serve("mixed", clients)
    assert static.first_token[5] >= static.first_token[1] + 29
    assert continuous.first_token[5] <= 6
    assert continuous.counts.steps < 0.5 * static.counts.steps


@pytest.mark.parametrize("policy", ["prefill_first", "decode_first", "mixed"])
def test_large_prompt_is_not_starved(policy: str) -> None:
    """Small requests keep arriving. The large request, which needs most of the pool, is served in order of arrival."""
    spec = EngineSpec(page_size=4, num_pages=20, max_running_requests=4, max_seq_len=80, vocab_size=50)
    clients = [job(2, 8, 12), job(1, 60, 4, arrive=1), *(job(uid, 8, 12, arrive=uid) for uid in range(3, 40))]
    report = serve(policy, clients, spec, starvation_steps=10_000)
    assert report.first_token[1] < report.first_token[6]


def copies(count: int, length: int, answer: int) -> list[Job]:
    """Return ``count`` requests with the same prompt of ``length`` tokens."""
    params = SamplingParams(max_tokens=answer, temperature=0.0, ignore_eos=True)
    return [Job(uid, [(i * i) % 50 for i in range(length)], params) for uid in range(1, count + 1)]


@pytest.mark.parametrize(("policy", "count"), [("prefill_first", 8), ("decode_first", 8), ("mixed", 64)])
@pytest.mark.parametrize(("length", "page_size"), [(64, 16), (65, 16), (63, 16), (64, 1), (65, 1), (16, 16)])
def test_copies_of_one_prompt_are_admitted_together(length: int, page_size: int, policy: str, count: int) -> None:
    """Of several copies of a prompt, one computes it, and all others are admitted in the next step with prompts.

    The cache never serves the page of the last token, so a copy must not wait for another request to compute it.
    """
    spec = EngineSpec(page_size, num_pages=64 * 96 // page_size, max_running_requests=64, max_seq_len=96, vocab_size=50)
    report = serve(policy, copies(count, length, 16), spec, thorough=False)
    usable = (length - 1) // page_size * page_size
    assert report.counts.prompt_tokens == count * length - (count - 1) * usable
    # decode_first computes the other prompts when the first answer has ended.
    assert report.counts.steps <= 17 + (16 if policy == "decode_first" else 0)


class RetractsAll:
    """The policy `mixed`, which retracts all running requests in plan number ``at``."""

    def __init__(self, at: int):
        self.inner, self.at, self.plans = make_plugin("scheduler", "mixed"), at, 0

    def plan(self, waiting: Sequence[Waiting], running: Sequence[Running], budget: Budget) -> Plan:
        self.plans += 1
        if self.plans == self.at:
            return Plan((), [r.uid for r in running])
        plan: Plan = self.inner.plan(waiting, running, budget)
        return plan


@pytest.mark.parametrize("page_size", [1, 4])
def test_retracted_copies_are_admitted_together(page_size: int) -> None:
    """Copies that are retracted with the same output are admitted again in at most three steps, whatever their length.

    If their tokens fill whole pages, the page of the last token is not cached yet, and none of them can use it.
    """
    spec = EngineSpec(page_size, num_pages=512 // page_size, max_running_requests=8, max_seq_len=64, vocab_size=50)
    steps = {}
    for at in range(4, 16):
        cache, clients = make_plugin("cache", "radix", page_size=page_size), copies(8, 16, 16)
        report = Drive(spec, cache, RetractsAll(at), overlap=False).run(clients)
        assert report.retractions == 8
        steps[at] = report.counts.steps
    assert max(steps.values()) <= 17 + 3


@pytest.mark.parametrize("count", [15, 16, 40])
def test_mixed_computes_prompts_beside_many_decode_rows(count: int) -> None:
    """As many requests decode as a step has tokens, or more: prompts still get a quarter of the tokens.

    A prompt of 200 tokens is computed in 50 steps of 4 tokens, while every running answer gets a token in every step.
    """
    spec = EngineSpec(page_size=16, num_pages=600, max_running_requests=64, max_seq_len=256, vocab_size=50)
    params = SamplingParams(max_tokens=120, temperature=0.0, ignore_eos=True)
    clients = [Job(uid, [uid], params) for uid in range(1, count + 1)]
    clients.append(Job(99, [i * i % 50 for i in range(200)], SamplingParams(max_tokens=2, temperature=0.0), arrive=12))
    report = serve("mixed", clients, spec, cache="naive", max_prefill_tokens=16, thorough=False)
    assert report.first_token[99] <= 12 + 200 // 4 + 1
    assert report.worst_gap == 1
    assert report.counts.max_tokens == max(16, count + 4)
