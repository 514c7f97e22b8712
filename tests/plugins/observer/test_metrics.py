"""The latency histograms: the real scheduler on the simulated engine, with a clock that the test advances."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families

from minisgl.core import EngineSpec, SamplingParams
from minisgl.plugin_manager.manager import PluginManager
from minisgl.scheduler.observer import HookObserver
from minisgl.scheduler.scheduler import Scheduler
from minisgl.testing import SimEngine, SimRequest


class Clock:
    """A clock whose time the test sets."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def scheduler_of(manager: PluginManager, clock: Clock, asks: Mapping[int, SimRequest]) -> Scheduler:
    spec = EngineSpec(page_size=4, num_pages=64, max_running_requests=1, max_seq_len=64, vocab_size=1000)
    cache = manager.build("cache", manager.make("cache", "naive"), page_size=4)
    policy = manager.build("scheduler", manager.make("scheduler", "prefill_first"))
    return Scheduler(
        SimEngine(spec, asks), cache, policy, overlap=False, observer=HookObserver(manager.hook), clock=clock
    )


def read(manager: PluginManager) -> dict[str, float]:
    text = "".join(manager.hook.minisgl_metrics())
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {s.name + (f"<={s.labels['le']}" if "le" in s.labels else ""): s.value for s in samples}


def test_latencies() -> None:
    """Two requests and one request-pool row: every histogram has the exact counts and sums of this run."""
    manager, clock = PluginManager.load(light=True), Clock()
    manager.load_built_in("observer", "metrics")
    params = SamplingParams(max_tokens=3, temperature=0.0)
    asks = {uid: SimRequest([uid, 2, 3], params) for uid in (1, 2)}
    scheduler = scheduler_of(manager, clock, asks)
    for uid, ask in asks.items():
        scheduler.add_request(uid, ask.prompt, ask.params)
    while scheduler.has_work:  # request 2 waits until request 1 has ended
        clock.now += 0.25
        scheduler.step()
    samples = read(manager)
    names = (
        "request_queue_time_seconds",
        "time_to_first_token_seconds",
        "inter_token_latency_seconds",
        "e2e_request_latency_seconds",
        "step_rows",
        "request_prefill_time_seconds",
        "request_decode_time_seconds",
        "request_inference_time_seconds",
        "step_tokens",
    )
    assert [samples[f"minisgl_{name}_count"] for name in names] == [2, 2, 4, 2, 6, 2, 2, 2, 6]
    assert samples["minisgl_step_tokens_sum"] == 2 * (3 + 1 + 1)
    assert samples["minisgl_request_prefill_time_seconds_sum"] == 0.0  # each step ends when it begins
    assert samples["minisgl_request_decode_time_seconds_sum"] == 2 * 2 * 0.25
    assert samples["minisgl_request_inference_time_seconds_sum"] == 2 * 2 * 0.25
    assert samples["minisgl_inter_token_latency_seconds_sum"] == 4 * 0.25
    assert samples["minisgl_inter_token_latency_seconds_bucket<=0.25"] == 4
    assert samples["minisgl_inter_token_latency_seconds_bucket<=0.15"] == 0
    assert samples["minisgl_time_to_first_token_seconds_sum"] == 0.25 + 4 * 0.25
    assert samples["minisgl_e2e_request_latency_seconds_sum"] == 3 * 0.25 + 6 * 0.25
    assert samples["minisgl_request_queue_time_seconds_bucket<=+Inf"] == 2


def test_state_is_per_engine_and_deleted() -> None:
    """Two engines in one process count separately, and finished requests leave no state."""
    one, other, clock = PluginManager.load(light=True), PluginManager.load(light=True), Clock()
    for manager in (one, other):
        manager.load_built_in("observer", "metrics")
    ask = SimRequest([1, 2, 3], SamplingParams(max_tokens=2, temperature=0.0))
    scheduler = scheduler_of(one, clock, {1: ask, 2: ask})
    scheduler.add_request(1, ask.prompt, ask.params)
    scheduler.add_request(2, ask.prompt, ask.params)
    scheduler.abort_request(2)
    while scheduler.has_work:
        scheduler.step()
    assert read(one)["minisgl_e2e_request_latency_seconds_count"] == 2
    assert read(other)["minisgl_e2e_request_latency_seconds_count"] == 0
    (observer,) = [p for p in one._manager.get_plugins() if type(p).__name__ == "Latencies"]
    assert not observer._arrival
    assert not observer._last_token
    assert not observer._admitted
    assert not observer._first_token
