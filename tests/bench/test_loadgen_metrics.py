"""Metrics of a hand-made list of events, the load of the client processes, and plots."""

from __future__ import annotations

import io
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
from rich.console import Console

from minisgl.bench.loadgen.client_load import client_load
from minisgl.bench.loadgen.completion import RequestRecord
from minisgl.bench.loadgen.measure import Results
from minisgl.bench.loadgen.metrics import details, max_concurrency, summarize, tokens_by_second
from minisgl.bench.loadgen.plan import WorkerResult
from minisgl.bench.loadgen.plot import distribution, draw, ticks
from minisgl.bench.loadgen.report import show


def record(index: int, start: float, times: list[float], tokens: int, **fields: object) -> RequestRecord:
    found = RequestRecord(index, tokens, 10 + index, start=start, end=times[-1] if times else start, times=times)
    found.output_len = tokens
    for name, value in fields.items():
        setattr(found, name, value)
    return found


RECORDS = [
    record(0, 100.0, [100.2, 100.3, 100.5, 100.6], 4),
    record(1, 100.5, [101.5, 102.5], 5, cached_len=8),  # the second event has four tokens
    record(2, 101.0, [101.1], 1),
    record(3, 101.0, [101.1], 1, error="HTTP 503: full"),
    record(4, 101.0, [101.1, 101.3], 2, interrupted=True),
    record(5, 101.0, [101.2, 101.4], 2, wrong="another number of tokens"),
]


def test_metrics_are_those_of_vllm_bench_serve() -> None:
    """The expected values are written out by hand, and percentiles are numpy's."""
    found = summarize(RECORDS, 4.0, {"ttft": 250, "tpot": 150})
    ttft = np.array([0.2, 1.0, 0.1, 0.2]) * 1e3
    tpot = np.array([0.4 / 3, 1.0 / 4, 0.2]) * 1e3  # a single token has none
    itl = np.array([0.1, 0.2, 0.1, 1.0, 0.2]) * 1e3
    e2el = np.array([0.6, 2.0, 0.1, 0.4]) * 1e3
    for name, values in (("ttft", ttft), ("tpot", tpot), ("itl", itl), ("e2el", e2el)):
        assert found[f"mean_{name}_ms"] == pytest.approx(values.mean())
        assert found[f"median_{name}_ms"] == pytest.approx(np.median(values))
        assert found[f"std_{name}_ms"] == pytest.approx(values.std())
        for p in (50, 90, 99):
            assert found[f"p{p}_{name}_ms"] == pytest.approx(np.percentile(values, p))
    assert (found["completed"], found["failed"], found["interrupted"]) == (4, 1, 1)
    assert found["total_input_tokens"] == 10 + 11 + 12 + 15
    assert found["total_output_tokens"] == 4 + 5 + 1 + 2
    assert found["request_throughput"] == 1.0
    assert found["output_throughput"] == 12 / 4
    assert found["total_token_throughput"] == (48 + 12) / 4
    # Request 0 keeps both limits. So does 2: a single token counts as a TPOT of 0. 1 breaks both, 5 the TPOT's.
    assert found["request_goodput"] == 2 / 4
    assert found["max_concurrent_requests"] == 3
    assert found["failures"] == {"HTTP 503: full": 1}
    assert found["wrong"] == {"another number of tokens": 1}
    assert found["cached_prompt_tokens"] == 8
    assert found["tokens_per_event"] == 12 / 9


def test_goodput_limits_are_inclusive_and_optional() -> None:
    exact = [record(0, 0.0, [0.25, 0.5], 2)]
    assert summarize(exact, 1.0, {"ttft": 250, "tpot": 250, "e2el": 500})["request_goodput"] == 1.0
    assert summarize(exact, 1.0, {"e2el": 499})["request_goodput"] == 0.0
    assert summarize(exact, 1.0, {})["request_goodput"] is None


def test_no_complete_request() -> None:
    found = summarize([RECORDS[3]], 0.0, {"ttft": 1})
    assert (found["completed"], found["output_throughput"], found["p99_ttft_ms"]) == (0, 0.0, 0.0)
    assert summarize([], 1.0, {})["max_output_tokens_per_s"] == 0.0


def test_tokens_by_second_and_concurrency() -> None:
    """Times relative to the first request: 0.2 0.3 0.5 0.6, then 1.5 and 2.5 with 2.5 tokens each."""
    assert tokens_by_second(RECORDS[:2]) == [4.0, 2.5, 2.5]
    back_to_back = [record(0, 0.0, [1.0], 1), record(1, 1.0, [2.0], 1), record(2, 1.5, [1.8], 1)]
    assert max_concurrency(back_to_back) == 2, "a request that ends when another starts is not beside it"


def test_details_are_in_order_of_the_requests() -> None:
    found = details(RECORDS[::-1])
    assert found["input_lens"] == [10, 11, 12, 13, 14, 15]
    assert found["output_lens"] == [4, 5, 1, 0, 0, 2]
    assert found["ttfts"][0] == pytest.approx(0.2)
    assert found["itls"][0] == pytest.approx([0.1, 0.2, 0.1])
    assert found["errors"] == ["", "", "", "HTTP 503: full", "interrupted", ""]


# ---- the client --------------------------------------------------------------------------------------


def result(cpu: float, lags: list[float], delays: list[float]) -> WorkerResult:
    records = [RequestRecord(i, 1, 1, due=float(i), start=i + delay) for i, delay in enumerate(delays)]
    return WorkerResult(records, lags, cpu_seconds=cpu, wall_seconds=10.0)


def test_client_with_little_to_do_is_no_limit() -> None:
    load = client_load([result(1.0, [0.001] * 100, [0.001] * 50), result(2.0, [0.002] * 100, [])], 0.05, 0.01)
    assert load.limits == []
    assert (load.processes, load.max_cpu_share, load.p99_loop_lag_ms) == (2, 0.2, 2.0)
    assert load.p99_send_delay_ms == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("results", "words"),
    [
        ([result(1.0, [], []), result(9.0, [], [])], "used 90% of a CPU: set processes= to more than 2"),
        ([result(1.0, [0.02] * 10, [])], "woke up 20.0 ms late (p99), although it used 10% of a CPU"),
        ([result(1.0, [], [0.0] * 90 + [0.03] * 10)], "requests were sent 30.0 ms late"),
    ],
)
def test_client_that_is_the_limit(results: list[WorkerResult], words: str) -> None:
    (reason,) = client_load(results, 0.05, 0.01).limits
    assert words in reason


def test_delays_are_judged_by_what_they_falsify() -> None:
    """A client that is 20 ms late is good enough for a server that needs a second."""
    late = [result(1.0, [0.02] * 10, [0.02] * 10)]
    assert client_load(late, 1.0, 0.5).limits == []
    assert len(client_load(late, 0.05, 0.0).limits) == 2
    assert len(client_load(late, 0.0, 0.0).limits) == 2


def test_report_says_when_the_client_was_the_limit() -> None:
    for cpu, expected in ((9.0, True), (1.0, False)):
        file = io.StringIO()
        load = client_load([result(cpu, [0.001], [0.001])], 0.05, 0.01)
        show([report(client=load.plain())], "x", Console(file=file, width=200))
        assert ("THE CLIENT WAS THE LIMIT" in file.getvalue()) == expected
        assert "of a CPU each" in file.getvalue()


# ---- the plot ----------------------------------------------------------------------------------------


def report(**fields: object) -> dict[str, object]:
    found = summarize(RECORDS, 4.0, {"ttft": 250})
    load = {"request_rate": 8.0, "burstiness": 1.0, "max_concurrency": None, "goodput_limits": {"ttft": 250}}
    rest = {"interrupted_run": False, "warmup_failures": {}}
    return {**found, **load, **rest, "model_id": "<model> & more", "options": {"url": "http://x"}, **fields}


def test_svg_of_one_run_is_well_formed() -> None:
    svg = draw(Results(False, [report()], [RECORDS]))
    root = ElementTree.fromstring(svg)
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "<model> & more at http://x: 8 requests/s" in texts
    assert "Output tokens per second" in texts and "Requests in flight" in texts
    assert sum(element.get("class") == "s0" for element in root.iter("{http://www.w3.org/2000/svg}path")) == 6
    ElementTree.fromstring(draw(Results(False, [report()], [[]])))


@pytest.mark.parametrize(
    "loads",
    [
        [{"request_rate": 1.0}, {"request_rate": "inf"}],
        [{"max_concurrency": 1, "request_rate": "inf"}, {"max_concurrency": 64, "request_rate": "inf"}],
        [{"replay_speed": 1.0}, {"replay_speed": 4.0}],
    ],
)
def test_svg_of_a_sweep_is_well_formed(loads: list[dict[str, object]]) -> None:
    svg = draw(Results(True, [report(**load) for load in loads], [RECORDS, RECORDS]))
    root = ElementTree.fromstring(svg)
    dots = list(root.iter("{http://www.w3.org/2000/svg}circle"))
    assert len(dots) == 2 * (1 + 2 + 4 * 3)  # throughput, requests and good requests, three percentiles of four metrics


def test_ticks_and_distribution() -> None:
    assert ticks(237.0) == [0, 50, 100, 150, 200, 250]
    assert ticks(0.0031)[-1] >= 0.0031
    assert ticks(10.0)[-1] == 10.0
    assert ticks(0.0) == [0.0, 1.0]
    assert distribution([]) == []
    points = distribution([0.001 * i for i in range(1, 1001)])
    assert points[0] == (1.0, 0.0) and points[-1] == (1000.0, 100.0)
    assert len(points) <= 201
