"""A replica without a model: its times are those of single steps, and its caches those of the real scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.bench.clusters.requests import Request, made_up, prepare
from minisgl.bench.clusters.results import Served
from minisgl.bench.clusters.simulate import simulate
from minisgl.core import EngineSpec, SamplingParams
from minisgl.plugins.cache.prefix import make_manager
from minisgl.plugins.scheduler.guard import StarvationGuard
from minisgl.scheduler import Scheduler
from minisgl.testing.drive import make_plugin
from minisgl.testing.null import NullEngine
from minisgl.testing.replica import SimReplica, StepCost

COST = StepCost(step=7e-3, prompt_token=4e-5, prompt_context=3e-9, decode_row=1e-5, decode_context=4e-7)
BLOCK = 64


def spec(pages: int) -> EngineSpec:
    return EngineSpec(BLOCK, pages, 32, 8192, 2**31 - 1)


def replica(pages: int) -> SimReplica:
    cache, policy = make_plugin("cache", "radix", page_size=BLOCK), make_plugin("scheduler", "prefill_first")
    return SimReplica(spec(pages), cache, policy, COST, max_prefill_tokens=1024)


def play(requests: Sequence[Request], pages: int, count: int = 1, speed: float = 1.0) -> list[Served]:
    return simulate(requests, make_plugin("routing", "round_robin"), [replica(pages) for _ in range(count)], speed)


def plain(requests: Sequence[Request], pages: int, speed: float) -> tuple[list[Served], dict[str, int]]:
    """Return what a scheduler does that computes every step by itself, and its counters."""
    engine, now = NullEngine(spec(pages)), 0.0
    cache, policy = make_plugin("cache", "radix", page_size=BLOCK), make_plugin("scheduler", "prefill_first")
    scheduler = Scheduler(
        engine, cache, StarvationGuard(policy, 512), max_prefill_tokens=1024, overlap=False, make_manager=make_manager
    )
    ttfts: dict[int, float] = {}
    served: dict[int, Served] = {}
    waiting = [(request.arrival / speed, uid, request) for uid, request in enumerate(requests)]
    while waiting or scheduler.has_work:
        if not scheduler.has_work:
            now = max(now, waiting[0][0])
        while waiting and waiting[0][0] <= now:
            _, uid, request = waiting.pop(0)
            params = SamplingParams(max_tokens=request.output_tokens, ignore_eos=True, temperature=0.0)
            scheduler.add_request(uid, request.prompt_ids(), params)
        engine.last = None
        output = scheduler.step()
        step = engine.last
        assert step is not None
        now += COST.step
        for row, (start, tokens) in enumerate(zip(step.num_computed_tokens, step.num_scheduled_tokens, strict=True)):
            if row < step.num_decode:
                now += COST.decode_row + COST.decode_context * (int(start) + 1)
            else:
                now += tokens * COST.prompt_token + tokens * COST.prompt_context * (int(start) + int(tokens) / 2)
        for uid in output.uids:
            ttfts.setdefault(uid, now - requests[uid].arrival / speed)
        for end in output.finished:
            served[end.uid] = Served(0, ttfts[end.uid], end.prompt_tokens, end.cached_tokens, end.output_tokens)
    return [served[uid] for uid in range(len(requests))], scheduler.stats()


@pytest.mark.parametrize(("pages", "speed", "answer"), [(4000, 1, 1), (4000, 20, 1), (60, 1, 1), (60, 20, 16)])
def test_one_replica_is_the_plain_scheduler(pages: int, speed: float, answer: int) -> None:
    """With much and with little memory, at low and at high load: the same hits, the same times."""
    requests = [r for r in prepare(made_up(60, 1, BLOCK), BLOCK) if len(r.blocks) < 40]
    requests = [replace(r, output_tokens=answer * r.output_tokens) for r in requests]
    expected, stats = plain(requests, pages, speed)
    found = play(requests, pages, speed=speed)
    assert [s[2:] for s in found] == [s[2:] for s in expected]
    np.testing.assert_allclose([s.ttft for s in found], [s.ttft for s in expected], rtol=1e-9)
    assert (stats["evicted_pages"] > 0) == (pages == 60)
    assert (stats["retractions"] > 0) == (answer == 16)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_hits_of_equal_prompts(count: int) -> None:
    """Each replica computes the prompt once. Of the others, all whole blocks but the last token's are found."""
    entries = made_up(1, 0, BLOCK)
    (first,) = prepare(entries, BLOCK)
    first = Request(0.0, 4 * BLOCK + 1, 3, (0, 1, 2, 3, 4), BLOCK, first.hashes)
    requests = [Request(10.0 * i, *list(vars(first).values())[1:]) for i in range(20)]
    served = play(requests, 100, count)
    assert [s.cached_tokens for s in served] == [0] * count + [4 * BLOCK] * (20 - count)
    assert [s.replica for s in served] == [i % count for i in range(20)]


@pytest.mark.parametrize("routing", ["round_robin", "least_loaded", "cache_aware"])
def test_tokens_are_conserved(routing: str) -> None:
    requests = prepare(made_up(80, 2, BLOCK), BLOCK)
    served = simulate(requests, make_plugin("routing", routing), [replica(80) for _ in range(3)], 8.0)
    assert [s.output_tokens for s in served] == [r.output_tokens for r in requests]
    assert [s.prompt_tokens for s in served] == [r.prompt_tokens for r in requests]
    assert all(0 <= s.cached_tokens < s.prompt_tokens and s.ttft > 0 for s in served)


def test_the_router_learns_nothing_early() -> None:
    """The notices up to a time are those of steps that have ended; the end of a run of steps is not known before."""
    sim = replica(100)
    sim.add(0, np.arange(200, dtype=np.int32), 50, 0.0)
    prefill = COST.step + COST.prefill(np.zeros(1, np.int32), np.array([200], np.int32))
    decode = COST.decode(1, 201.0, 49)
    sim.advance(prefill + decode / 2)
    assert not list(sim.learned(prefill * 0.99))
    (notice,) = sim.learned(prefill + decode / 2)
    assert notice.time == pytest.approx(prefill)
    assert (list(notice.first_tokens), notice.finished, len(notice.events)) == ([0], [], 2)
    sim.advance(10.0)
    (notice,) = sim.learned(10.0)
    assert notice.time == pytest.approx(prefill + decode)
    assert [end.uid for end in notice.finished] == [0]


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 64), st.integers(0, 10**6), st.integers(1, 4000), st.floats(0.0, 100.0))
def test_a_run_costs_as_much_as_its_steps(rows: int, context: int, steps: int, seconds: float) -> None:
    single = sum(COST.decode(rows, context + i * rows) for i in range(min(steps, 50)))
    assert COST.decode(rows, context, min(steps, 50)) == pytest.approx(single)
    assert COST.steps_until(rows, context, COST.decode(rows, context, steps)) == steps
    needed = COST.steps_until(rows, context, seconds)
    assert COST.decode(rows, context, needed) >= seconds * (1 - 1e-9)
    assert needed == 1 or COST.decode(rows, context, needed - 1) < seconds
