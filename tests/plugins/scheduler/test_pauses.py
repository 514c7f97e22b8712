"""Pauses of running requests while prompts of others are computed, with a clock that counts prompt tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import zmq

from minisgl.config import Config
from minisgl.core import EngineSpec, SamplingParams
from minisgl.message.queue import Addresses
from minisgl.options.compose import compose
from minisgl.plugin_manager.manager import PluginManager
from minisgl.plugins.scheduler.pauses import LEAST_TOKENS, SHARE, ShortPauses
from minisgl.scheduler.base import Budget, Plan, Running, Waiting
from minisgl.server import rank_process
from minisgl.testing.drive import Drive, Job, Report, make_plugin

SPEC = EngineSpec(page_size=16, num_pages=4000, max_running_requests=64, max_seq_len=4096, vocab_size=100)
MAX_PAUSE = 0.1


class Recorder:
    """A policy that notes the prompt tokens of its plans. At a plan, the step planned ``lag`` plans ago has ended."""

    def __init__(self, policy: Any, tokens_per_second: float, lag: int):
        self.policy, self.speed, self.lag = policy, tokens_per_second, lag
        self.plans: list[tuple[int, bool, bool]] = []  # prompt tokens, whether rows decode, whether one of them waits
        self.now = 0.0

    def clock(self) -> float:
        if len(self.plans) >= self.lag:
            self.now += max(self.plans[-self.lag][0], 64) / self.speed  # a decode step takes as long as 64 tokens
        return self.now

    def plan(self, waiting: Sequence[Waiting], running: Sequence[Running], budget: Budget) -> Plan:
        plan = self.policy.plan(waiting, running, budget)
        if plan.rows:
            decoding = {r.uid for r in running if not r.num_remaining_tokens}
            tokens = sum(count for uid, count in plan.rows if uid not in decoding)
            self.plans.append((tokens, any(uid in decoding for uid, _ in plan.rows), bool(decoding)))
        return plan


def burst(speed: float, *, overlap: bool = True, short: bool = True) -> tuple[Report, list[int]]:
    """Serve 40 prompts of 600 tokens that arrive while a request decodes, twice.

    Return the report, and how many prompt tokens were computed between two steps with decode rows, in order.
    """
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    jobs = [Job(1, [1, 2, 3], SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True))]
    jobs += [Job(uid, [(uid + i * i) % 100 for i in range(600)], params, 5 + 200 * (uid > 41)) for uid in range(2, 82)]
    recorder = Recorder(make_plugin("scheduler", "prefill_first"), speed, 1 + overlap)
    policy = ShortPauses(recorder, MAX_PAUSE, lag=1 + overlap, clock=recorder.clock) if short else recorder
    cache = make_plugin("cache", "naive", page_size=16)
    report = Drive(SPEC, cache, policy, overlap=overlap, max_prefill_tokens=8192, thorough=False).run(jobs)
    gaps, tokens = [], 0
    for computed, has_decode_rows, waits in recorder.plans:
        tokens = 0 if has_decode_rows or not waits else tokens + computed
        gaps += [tokens] if tokens else []
    return report, gaps


@pytest.mark.parametrize("overlap", [True, False])
def test_decode_rows_wait_for_a_bounded_time(overlap: bool) -> None:
    speed = 20_000.0
    report, gaps = burst(speed, overlap=overlap)
    plain, without = burst(speed, overlap=overlap, short=False)
    assert max(without) == 40 * 600  # a whole burst
    limit = SHARE * MAX_PAUSE * speed
    measured = gaps.index(max(gaps)) + 3  # the first prompts of the first burst are computed before the speed is known
    assert max(gaps[measured:]) <= limit
    assert max(gaps[measured:]) >= limit - LEAST_TOKENS / 2  # and no smaller chunks than that needs
    assert report.tokens == plain.tokens


def test_slow_engines_get_chunks_of_a_useful_size() -> None:
    _, gaps = burst(500.0)
    assert max(gaps[len(gaps) // 2 :]) == LEAST_TOKENS


def test_fast_engines_are_not_slowed_down() -> None:
    report, gaps = burst(1e7)
    plain, without = burst(1e7, short=False)
    assert gaps == without
    assert report.steps == plain.steps


def test_a_server_has_it_and_an_llm_has_not(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = PluginManager.load()
    config = compose(manager, ["model=tutor", "device=cpu"])
    seen: list[list[str]] = []

    def build(config: Config, manager: PluginManager, *_: Any, **__: Any) -> None:
        wrappers = manager.hook.minisgl_wrap_policy(config=config)
        seen.append([wrapper.func.__name__ for wrapper in wrappers])
        raise KeyboardInterrupt

    monkeypatch.setattr(rank_process, "build_scheduler", build)
    context: zmq.Context[Any] = zmq.Context()
    addresses = Addresses.make(tokenizers=1, tp=1)
    try:
        with pytest.raises(KeyboardInterrupt):
            rank_process.run_leader(None, addresses, context, config, manager, None)  # type: ignore[arg-type]
    finally:
        context.destroy(linger=0)
        addresses.remove()
    assert seen == [["ShortPauses"]]
    off = compose(manager, ["model=tutor", "device=cpu", "scheduler.max_pause=0"])
    assert manager.hook.minisgl_wrap_policy(config=off) == []
    assert PluginManager.load().hook.minisgl_wrap_policy(config=config) == []  # as an LLM has
