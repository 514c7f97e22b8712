"""The latency histograms: driven by the real scheduler on the simulated engine, with a clock that we turn."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families

from minisgl.core import EngineSpec, SamplingParams
from minisgl.plugin_manager.manager import PluginManager
from minisgl.scheduler.scheduler import Scheduler
from minisgl.testing import Ask, SimEngine


class Clock:
    """Stands still until it is turned."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def scheduler_of(manager: PluginManager, clock: Clock, asks: Mapping[int, Ask]) -> Scheduler:
    spec = EngineSpec(page_size=4, num_pages=64, max_running_requests=1, max_seq_len=64, vocab_size=1000)
    cache = manager.build("cache", manager.make("cache", "naive"), page_size=4)
    policy = manager.build("scheduler", manager.make("scheduler", "prefill_first"))
    return Scheduler(SimEngine(spec, asks), cache, policy, overlap=False, hook=manager.hook, clock=clock)


def read(manager: PluginManager) -> dict[str, float]:
    text = "".join(manager.hook.minisgl_metrics())
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {s.name + (f"<={s.labels['le']}" if "le" in s.labels else ""): s.value for s in samples}


def test_waits_are_measured_from_arrival_to_end() -> None:
    manager, clock = PluginManager.load(light=True), Clock()
    params = SamplingParams(max_tokens=3, temperature=0.0)
    asks = {uid: Ask([uid, 2, 3], params) for uid in (1, 2)}
    scheduler = scheduler_of(manager, clock, asks)
    for uid, ask in asks.items():
        scheduler.add_request(uid, ask.prompt, ask.params)
    while scheduler.has_work:  # one slot: request 2 waits until request 1 has ended
        clock.now += 0.25
        scheduler.step()
    samples = read(manager)
    names = ("queue_seconds", "first_token_seconds", "next_token_seconds", "request_seconds", "step_rows")
    assert [samples[f"minisgl_{name}_count"] for name in names] == [2, 2, 4, 2, 6]
    assert samples["minisgl_next_token_seconds_sum"] == 4 * 0.25
    assert samples["minisgl_next_token_seconds_bucket<=0.25"] == 4
    assert samples["minisgl_next_token_seconds_bucket<=0.15"] == 0
    assert samples["minisgl_first_token_seconds_sum"] == 0.25 + 4 * 0.25
    assert samples["minisgl_request_seconds_sum"] == 3 * 0.25 + 6 * 0.25
    assert samples["minisgl_queue_seconds_bucket<=+Inf"] == 2


def test_two_engines_count_apart_and_nothing_is_kept() -> None:
    one, other, clock = PluginManager.load(light=True), PluginManager.load(light=True), Clock()
    ask = Ask([1, 2, 3], SamplingParams(max_tokens=2, temperature=0.0))
    scheduler = scheduler_of(one, clock, {1: ask, 2: ask})
    scheduler.add_request(1, ask.prompt, ask.params)
    scheduler.add_request(2, ask.prompt, ask.params)
    scheduler.abort_request(2)
    while scheduler.has_work:
        scheduler.step()
    assert read(one)["minisgl_request_seconds_count"] == 2
    assert read(other)["minisgl_request_seconds_count"] == 0
    (observer,) = [p for p in one._manager.get_plugins() if type(p).__name__ == "Latencies"]
    assert not observer._added
    assert not observer._latest
    assert not observer._waiting
