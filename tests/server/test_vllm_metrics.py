"""The metrics under vLLM's names: which there are, and that their values are right."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from minisgl.core import EngineSpec, Finished, SamplingParams
from minisgl.plugins.http.vllm_metrics import OBSERVED, VllmMetrics, token_buckets
from minisgl.plugins.observer.metrics import SECONDS, TOKENS, Histogram
from minisgl.server.extension import Stats
from minisgl.testing.serving import Server

pytestmark = pytest.mark.xdist_group("test_vllm_metrics")  # one process: the server starts once

ROOT = Path(__file__).resolve().parents[2]
DASHBOARD = ROOT / "docs" / "operation" / "grafana.json"
RunApp = Callable[..., None]
SPEC = EngineSpec(page_size=16, num_pages=64, max_running_requests=8, max_seq_len=512, vocab_size=320)

HISTOGRAMS = "e2e_request_latency_seconds inter_token_latency_seconds time_to_first_token_seconds"
OTHERS = """
prompt_tokens_total generation_tokens_total num_requests_running num_requests_waiting kv_cache_usage_perc
request_prompt_tokens_bucket request_generation_tokens_bucket request_success_total request_queue_time_seconds_sum
request_prefill_time_seconds_sum request_decode_time_seconds_sum request_max_num_generation_tokens_sum
"""
VLLM_DASHBOARD = {
    *(f"vllm:{name}_{part}" for name in HISTOGRAMS.split() for part in ("bucket", "sum", "count")),
    *(f"vllm:{name}" for name in OTHERS.split()),
}
"""The names that the queries of vLLM's own dashboard for Grafana contain."""


def check_histograms(families: dict[str, Metric]) -> int:
    """Check the form of every histogram, and return how many there are."""
    checked = 0
    for family in families.values():
        if family.type != "histogram":
            continue
        series: dict[tuple[tuple[str, str], ...], dict[str, Any]] = {}
        for sample in family.samples:
            labels = tuple(sorted((k, v) for k, v in sample.labels.items() if k != "le"))
            one = series.setdefault(labels, {"buckets": []})
            if sample.name.endswith("_bucket"):
                one["buckets"].append((float(sample.labels["le"]), sample.value))
            else:
                one[sample.name.removeprefix(family.name)] = sample.value
        for one in series.values():
            assert one["buckets"][-1][0] == float("inf"), family.name
            for (bound, count), (next_bound, next_count) in pairwise(one["buckets"]):
                assert bound < next_bound, family.name
                assert count <= next_count, family.name
            assert one["buckets"][-1][1] == one["_count"], family.name
            assert one["_sum"] >= 0, family.name
            checked += 1
    return checked


def parse(text: str) -> dict[str, Metric]:
    families = list(text_string_to_metric_families(text))
    assert len({family.name for family in families}) == len(families), "a metric is exported twice"
    return {family.name: family for family in families}


def values(families: dict[str, Metric]) -> dict[str, float]:
    """Return the samples without buckets: name, with the finish reason if there is one → value."""
    found = {}
    for family in families.values():
        for sample in family.samples:
            if "le" not in sample.labels:
                reason = sample.labels.get("finished_reason")
                found[sample.name + (f" {reason}" if reason else "")] = sample.value
    return found


@pytest.fixture(scope="module")
def families() -> dict[str, Metric]:
    """Return the metrics of a real server that verifies drafts after two requests, of one and of two choices."""
    with Server("model=tutor", "num_pages=512", "speculation=ngram", "speculation.max_drafts=3") as server:
        for n in (1, 2):
            body = {"prompt": "What is 12 + 30?", "max_tokens": 4, "ignore_eos": True, "n": n}
            httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).raise_for_status()
        assert server.wait_until_idle()
        return parse(httpx.get(f"{server.url}/metrics", timeout=60).text)


def test_metrics_of_a_server(families: dict[str, Metric]) -> None:
    assert check_histograms(families) >= 20
    found = values(families)
    assert found["vllm:num_requests_running"] == found["vllm:num_requests_waiting"] == 0
    assert found["vllm:request_success_total length"] == 3
    assert found["vllm:generation_tokens_total"] == 12
    assert found["vllm:prompt_tokens_total"] == found["vllm:prefix_cache_queries_total"]
    assert 0 <= found["vllm:prefix_cache_hits_total"] < found["vllm:prefix_cache_queries_total"]
    assert found["vllm:time_to_first_token_seconds_count"] == found["vllm:request_queue_time_seconds_count"] == 3
    # The API server sees a request's tokens after the scheduler, and its arrival before the scheduler.
    ours, theirs = found["minisgl_time_to_first_token_seconds_sum"], found["vllm:time_to_first_token_seconds_sum"]
    assert 0 < ours < theirs
    for family in families.values():
        if family.name.startswith("vllm:"):
            labels = {"model_name", "engine"} if family.name != "vllm:cache_config_info" else {"engine", "block_size"}
            assert all(labels <= sample.labels.keys() for sample in family.samples), family.name


def test_names_of_the_vllm_dashboard(families: dict[str, Metric]) -> None:
    names = {sample.name for family in families.values() for sample in family.samples}
    assert not VLLM_DASHBOARD - names


def test_dashboard_uses_exported_metrics(families: dict[str, Metric]) -> None:
    """Every query of our dashboard names metrics, and labels of them, that a server exports.

    Prometheus itself adds the label ``instance``.
    """
    samples = [sample for family in families.values() for sample in family.samples]
    labels = {s.name: set(s.labels) for s in samples}
    dashboard = json.loads(DASHBOARD.read_text("utf-8"))
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    queries = [target["expr"] for panel in panels for target in panel["targets"]]
    queries += [variable["definition"] for variable in dashboard["templating"]["list"] if variable["type"] == "query"]
    assert len(queries) > 20
    for query in queries:
        used = re.findall(r"\b((?:vllm:|minisgl_)\w+)(?:\{([^}]*)\})?", query)
        assert used, query
        for name, matchers in used:
            assert name in labels, f"{query}: a server exports no {name}"
            for label in re.findall(r"(\w+)=", matchers):
                assert label == "instance" or label in labels[name], f"{query}: {name} has no label {label}"
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


def test_counts_of_requests(run_app: RunApp) -> None:
    """The exact counts after requests that end, are refused, and have several choices."""

    async def test(server: Any) -> None:
        server.counts |= {"num_pages": 64.0, "num_free_pages": 16.0, "num_evictable_pages": 32.0}
        server.counts |= {"prompt_tokens": 40.0, "cached_prompt_tokens": 16.0, "num_running_reqs": 3.0}
        async with server.client() as client:
            for body in ({"n": 2, "max_tokens": 9}, {"n": 1}, {"n": 0}):
                await client.post("/v1/completions", json={"prompt": [1, 2, 3], **body})
            families = parse((await client.get("/metrics")).text)
        check_histograms(families)
        found = values(families)
        assert found["vllm:request_success_total length"] == 3
        assert found["vllm:request_success_total stop"] == found["vllm:request_success_total abort"] == 0
        for name in ("time_to_first_token", "e2e_request_latency", "request_time_per_output_token"):
            assert found[f"vllm:{name}_seconds_count"] == 3
        assert found["vllm:request_prompt_tokens_sum"] == 9
        assert found["vllm:request_generation_tokens_sum"] == 6
        assert (found["vllm:request_params_n_count"], found["vllm:request_params_n_sum"]) == (2, 3)
        assert found["vllm:request_params_max_tokens_sum"] == 9 + 16
        assert found["vllm:request_max_num_generation_tokens_sum"] == 2 + 2
        assert found["vllm:kv_cache_usage_perc"] == 0.25
        assert found["vllm:prefix_cache_hits_total"] == 16
        assert found["vllm:num_requests_running"] == 3

    run_app(test)


def test_drafts(run_app: RunApp) -> None:
    """The counts of drafts have vLLM's names; a server without a proposer has none."""

    async def test(server: Any) -> None:
        async with server.client() as client:
            assert "draft" not in (await client.get("/metrics")).text
            server.counts |= {"verification_rows": 10.0, "draft_tokens": 30.0, "accepted_draft_tokens": 12.0}
            server.counts |= {f"accepted_draft_tokens_per_pos_{k}": 8.0 - 4 * k for k in range(3)}
            families = parse((await client.get("/metrics")).text)
        found = values(families)
        assert found["vllm:spec_decode_num_drafts_total"] == found["minisgl_scheduler_verification_rows_total"] == 10
        assert found["vllm:spec_decode_num_draft_tokens_total"] == 30
        assert found["vllm:spec_decode_num_accepted_tokens_total"] == 12
        for name in ("vllm:spec_decode_num_accepted_tokens_per_pos", "minisgl_scheduler_accepted_draft_tokens_per_pos"):
            samples = families[name].samples
            assert {sample.name for sample in samples} == {f"{name}_total"}
            assert {s.labels["position"]: s.value for s in samples} == {"0": 8, "1": 4, "2": 0}

    run_app(test)


def test_observed_histograms_keep_their_values() -> None:
    """A histogram of the observer has vLLM's buckets too. Its export has only these, with the same counts."""
    assert {bound for *_, bounds in OBSERVED for bound in bounds} <= {*SECONDS, *TOKENS}
    ours = Histogram("minisgl_request_queue_time_seconds", "x", SECONDS)
    for seconds in (0.0004, 0.29, 0.3, 0.31, 45.0, 10_000.0):
        ours.add(seconds)
    metrics = VllmMetrics("m", SPEC)
    counts = dict.fromkeys(("num_running_reqs", "num_waiting_reqs", "output_tokens", "retractions"), 0.0)
    counts |= {"prompt_tokens": 0.0, "cached_prompt_tokens": 0.0, "num_pages": 1.0}
    counts |= {"num_free_pages": 1.0, "num_evictable_pages": 0.0}
    text = text_of(ours) + '# a line of another plugin\nminisgl_x{a="b"} NaN\nsomething else\n'
    families = parse(metrics.text(Stats(counts, text)).decode())
    assert check_histograms(families) == 9
    family = families["vllm:request_queue_time_seconds"]
    buckets = {sample.labels["le"]: sample.value for sample in family.samples if "le" in sample.labels}
    assert len(buckets) == 22
    assert (buckets["0.3"], buckets["0.5"], buckets["40.0"], buckets["50.0"], buckets["+Inf"]) == (3, 4, 4, 5, 6)
    assert values(families)["vllm:request_queue_time_seconds_sum"] == pytest.approx(10045.9004)


def text_of(histogram: Histogram) -> str:
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.registry import Collector

    class One(Collector):
        def collect(self) -> Any:
            return [histogram.family()]

    registry = CollectorRegistry(auto_describe=False)
    registry.register(One())
    return generate_latest(registry).decode()


def test_ends_that_count() -> None:
    metrics = VllmMetrics('a "model"\n', SPEC)
    metrics.add_finished(Finished(1, "stop", 5, 0, 1), 2.0, 1.0)
    metrics.add_finished(Finished(2, "error", error="refused", status=400), 2.0, None)
    metrics.add_finished(Finished(3, "error", error="too long", status=504), 2.0, None)
    metrics.add_prompt(SamplingParams(n=2), [None, Finished(3, "error", status=504)])
    found = {
        (sample.name, sample.labels.get("finished_reason")): sample.value
        for family in metrics.registry.collect()
        for sample in family.samples
    }
    reasons = {reason: value for (name, reason), value in found.items() if name == "vllm:request_success_total"}
    assert reasons == {"stop": 1, "length": 0, "abort": 1, "error": 1}
    assert found["vllm:e2e_request_latency_seconds_count", None] == 2
    assert found["vllm:request_time_per_output_token_seconds_count", None] == 0  # it had one token
    assert found["vllm:request_prompt_tokens_count", None] == 1
    assert found["vllm:request_params_n_count", None] == 0


@pytest.mark.parametrize(
    ("most", "last"), [(1, [1]), (7, [1, 2, 5]), (1000, [200, 500, 1000]), (4999, [500, 1000, 2000])]
)
def test_token_buckets(most: int, last: list[int]) -> None:
    assert token_buckets(most)[-3:] == last
