"""The meter, with a clock that counts the turns of the scheduler, so that every expected time is exact."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from minisgl import LLM, SamplingParams
from minisgl.plugin_manager.manager import PluginManager
from minisgl.plugins.observer.meter import Meter, Timing
from minisgl.testing.drive import Drive, Job
from minisgl.testing.small import job, make, no_lookahead, pool

NAME = "minisgl.plugins.observer.meter"


def meter_of(manager: PluginManager) -> Meter:
    (meter,) = [p for p in manager._manager.get_plugins() if type(p) is Meter]
    return meter


def timed(clients: Sequence[Job], **options: Any) -> tuple[dict[int, Timing], Drive, Meter]:
    """Run ``clients`` and return the timing of each request, in turns of the scheduler."""
    manager = PluginManager.load([NAME], light=True)
    drive = make(observers=manager.hook, thorough=False, **{"overlap": False, **options})
    drive.run(clients)
    meter = meter_of(manager)
    return {timing.uid: timing for timing in meter.ended}, drive, meter


def test_chunked_prompt() -> None:
    found, _, _ = timed([job(1, length=20, answer=4)], max_prefill_tokens=8)
    assert found[1] == Timing(1, 2.0, (1.0, 1.0, 1.0))  # steps at times 0, 1 and 2 compute chunks of 8, 8 and 4 tokens


def test_ttft_includes_queue_time() -> None:
    """With one request-pool row, request 2 waits until request 1 has its six tokens."""
    found, _, _ = timed([job(1, answer=6), job(2, answer=3)], spec=pool(30, max_running_requests=1))
    assert found[1] == Timing(1, 0.0, (1.0,) * 5)
    assert found[2] == Timing(2, 6.0, (1.0,) * 2)


def test_retraction() -> None:
    """A retracted request keeps its TTFT, and its time in the waiting queue is one long inter-token latency."""
    with no_lookahead():
        found, drive, _ = timed([job(1, answer=20), job(2, answer=20)], spec=pool(9))
    assert drive.report.retractions > 0
    assert found[2].ttft == 0.0
    assert max(found[2].gaps) > 2.0
    assert [len(found[uid].gaps) for uid in (1, 2)] == [19, 19]


@pytest.mark.parametrize("overlap", [False, True])
def test_aborted_requests(overlap: bool) -> None:
    """Aborted requests are kept with the tokens that they got, and no request stays open."""
    clients = [job(1, answer=9, abort=4), job(2, answer=4), job(3, abort=0), job(4, length=30, abort=2, arrive=1)]
    found, drive, meter = timed(clients, overlap=overlap, max_prefill_tokens=16, spec=pool(30, max_running_requests=2))
    assert found[3] == Timing(3, None, ())
    assert len(found) == 4
    for uid, timing in found.items():
        tokens = len(drive.report.tokens[uid])
        assert (timing.ttft is not None) + len(timing.gaps) == tokens
    assert not meter.arrived
    assert not meter.tokens


def test_metrics() -> None:
    manager = PluginManager.load([NAME], light=True)
    meter = meter_of(manager)
    for uid, ttft in enumerate([4.0, 1.0, 3.0, 2.0, 5.0]):
        meter.ended.append(Timing(uid, ttft, (ttft / 2,)))
    meter.ended.append(Timing(9, None, ()))
    families = text_string_to_metric_families(meter.minisgl_metrics())
    samples = {(s.name, s.labels.get("quantile")): s.value for f in families for s in f.samples}
    assert samples["minisgl_meter_ttft_seconds", "0.5"] == 3.0
    assert samples["minisgl_meter_ttft_seconds", "1.0"] == 5.0
    assert samples["minisgl_meter_ttft_seconds_count", None] == 5
    assert samples["minisgl_meter_inter_token_latency_seconds_sum", None] == 7.5


def test_meter_with_a_model() -> None:
    with LLM("tutor", overrides=["device=cpu", f"plugins={NAME}"]) as llm:
        outputs = llm.generate(["Count from 5 to 9.", "What is 12 + 30?"], SamplingParams(max_tokens=6))
        meter = meter_of(llm.plugin_manager)
        assert sorted(len(timing.gaps) + 1 for timing in meter.ended) == sorted(len(o.token_ids) for o in outputs)
        assert all(timing.ttft is not None and timing.ttft > 0 for timing in meter.ended)
