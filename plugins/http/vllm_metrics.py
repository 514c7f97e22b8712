"""The metrics under the names, labels and buckets of vLLM, so that dashboards made for vLLM show this server too.

Times from the arrival of a request are measured in the API server, so they contain tokenization. The other times are
measured by the scheduler's observer (``plugins/observer/metrics.py``), and are exported here a second time.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from minisgl import hookimpl
from minisgl.config import Config
from minisgl.core import EngineSpec, Finished, SamplingParams
from minisgl.message import Delta
from minisgl.scheduler.steps import PER_POSITION
from minisgl.server.app import Api
from minisgl.server.extension import HttpExtension, Stats
from minisgl.server.request_record import RequestRecord, Stream

LABELS = ("model_name", "engine")
"""The labels of every metric. ``engine`` is the number of the engine, which is always 0 here."""
FINISH_REASONS = ("stop", "length", "abort", "error")
TIME_TO_FIRST_TOKEN = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
)  # fmt: skip
TIME_PER_TOKEN = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
REQUEST_TIME = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip
STEP_TOKENS = (1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0)
OBSERVED = (
    ("request_queue_time_seconds", "request_queue_time_seconds", "Time in the queue.", REQUEST_TIME),
    (
        "request_prefill_time_seconds",
        "request_prefill_time_seconds",
        "Time from admission to token 1.",
        REQUEST_TIME,
    ),
    ("request_decode_time_seconds", "request_decode_time_seconds", "Time from first to last token.", REQUEST_TIME),
    ("request_inference_time_seconds", "request_inference_time_seconds", "Admission to last token.", REQUEST_TIME),
    ("inter_token_latency_seconds", "inter_token_latency_seconds", "Time between two tokens.", TIME_PER_TOKEN),
    ("iteration_tokens_total", "step_tokens", "Tokens that were computed in a step.", STEP_TOKENS),
)
"""The observer's histograms: vLLM's name, the observer's name (without the prefixes), text and vLLM's buckets."""
_BUCKET = re.compile(r'^minisgl_(\w+)_bucket\{le="([^"]+)"\} (\S+)$', re.MULTILINE)
_VALUE = re.compile(r"^minisgl_(\w+) (\S+)$", re.MULTILINE)


@hookimpl
def minisgl_http(config: Config) -> HttpExtension:
    return VllmNames()


class VllmNames(HttpExtension):
    """Counts generations, and adds the metrics under vLLM's names to ``GET /metrics``."""

    def __init__(self) -> None:
        self._metrics: VllmMetrics | None = None  # there is none before the engine is ready

    def begin(self, api: Api) -> None:
        assert api.dispatcher.spec is not None
        self._metrics = VllmMetrics(api.model, api.dispatcher.spec)

    def watch(self, stream: Stream) -> Callable[[int, Delta], None] | None:
        metrics = self._metrics
        assert metrics is not None
        first_tokens: dict[int, float] = {}  # of each choice
        ended: set[int] = set()

        def add(index: int, delta: Delta) -> None:
            if delta.tokens and index not in first_tokens:
                first_tokens[index] = time.monotonic() - stream.arrival
                metrics.add_first_token(first_tokens[index])
            if delta.finish is not None and index not in ended:
                ended.add(index)
                metrics.add_finished(delta.finish, time.monotonic() - stream.arrival, first_tokens.get(index))

        return add

    def on_end(self, record: RequestRecord) -> None:
        stream = record.stream
        if stream is not None and self._metrics is not None:
            n = stream.params.n
            for first in range(0, len(stream.ends), n):
                self._metrics.add_prompt(stream.params, stream.ends[first : first + n])

    def metrics(self, stats: Stats) -> bytes:
        return b"" if self._metrics is None else self._metrics.text(stats)


def token_buckets(most: int) -> list[float]:
    """Return the buckets of a number of tokens: 1, 2, 5, 10, 20, 50, … up to ``most``."""
    numbers = [float(step * 10**power) for power in range(len(str(most))) for step in (1, 2, 5)]
    return [number for number in numbers if number <= most]


class VllmMetrics:
    """The counters and histograms of generations, which the API server fills, and the export of all others.

    It needs the limits of the engine, so it is made when the engine is ready. ``model_name`` is the model's name in the
    API. All times are in seconds.
    """

    def __init__(self, model_name: str, spec: EngineSpec):
        self._labels, self._spec = (model_name, "0"), spec
        self.registry = CollectorRegistry()
        tokens = token_buckets(spec.max_seq_len)

        def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            made = Histogram(f"vllm:{name}", text, LABELS, buckets=buckets, registry=self.registry)
            return made.labels(*self._labels)

        self._ttft = histogram(
            "time_to_first_token_seconds", "Time from arrival to the first token.", TIME_TO_FIRST_TOKEN
        )
        self._e2e = histogram("e2e_request_latency_seconds", "Time from arrival to the end.", REQUEST_TIME)
        self._tpot = histogram(
            "request_time_per_output_token_seconds",
            "Mean time per output token after the first, of a request.",
            TIME_PER_TOKEN,
        )
        self._prompt_tokens = histogram("request_prompt_tokens", "Prompt tokens of a request.", tokens)
        self._generation_tokens = histogram("request_generation_tokens", "Output tokens of a request.", tokens)
        self._longest = histogram(
            "request_max_num_generation_tokens", "Output tokens of a prompt's longest choice.", tokens
        )
        self._max_tokens = histogram("request_params_max_tokens", "The parameter max_tokens of a request.", tokens)
        self._n = histogram("request_params_n", "The parameter n of a request.", (1, 2, 5, 10, 20))
        success = Counter(
            "vllm:request_success", "Requests that ended.", [*LABELS, "finished_reason"], registry=self.registry
        )
        self._success = {reason: success.labels(*self._labels, reason) for reason in FINISH_REASONS}

    def add_first_token(self, seconds: float) -> None:
        """Count the first token of a choice, ``seconds`` after the arrival of its request."""
        self._ttft.observe(seconds)

    def add_finished(self, end: Finished, seconds: float, first_token: float | None) -> None:
        """Count a choice that ended ``seconds`` after the arrival of its request.

        ``first_token`` is the time of its first token, or None if it had none. A refused choice does not count, and of
        one that failed the number of tokens is not known.
        """
        if end.finish_reason == "error" and end.status < 500:
            return
        self._success[end.finish_reason].inc()
        self._e2e.observe(seconds)
        if end.finish_reason == "error":
            return
        self._prompt_tokens.observe(end.prompt_tokens)
        self._generation_tokens.observe(end.output_tokens)
        if first_token is not None and end.output_tokens > 1:
            self._tpot.observe((seconds - first_token) / (end.output_tokens - 1))

    def add_prompt(self, params: SamplingParams, ends: Sequence[Finished | None]) -> None:
        """Count a prompt, and how each of its choices ended: None is a choice whose client disconnected."""
        self._success["abort"].inc(ends.count(None))
        done = [end.output_tokens for end in ends if end is not None and end.finish_reason != "error"]
        if done:
            self._longest.observe(max(done))
            self._max_tokens.observe(params.max_tokens)
            self._n.observe(params.n)

    def text(self, stats: Stats) -> bytes:
        """Return all metrics in Prometheus' text format. ``stats`` are the current counts of the scheduler."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_SchedulerMetrics(self._labels, self._spec, stats))
        return generate_latest(self.registry) + generate_latest(registry)


class _SchedulerMetrics(Collector):
    """The counts of the scheduler, and the histograms of its observer, under vLLM's names."""

    def __init__(self, labels: Sequence[str], spec: EngineSpec, stats: Stats):
        self._labels, self._spec, self._counts = labels, spec, stats.values
        self._values = {name: float(value) for name, value in _VALUE.findall(stats.text)}
        self._buckets: dict[str, dict[float, float]] = {}
        for name, bound, count in _BUCKET.findall(stats.text):
            self._buckets.setdefault(name, {})[float(bound)] = float(count)

    def collect(self) -> Iterable[Metric]:
        yield from self._gauges()
        yield from self._counters()
        yield from self._drafts()
        for name, observed, text, bounds in OBSERVED:
            if observed in self._buckets:
                family = HistogramMetricFamily(f"vllm:{name}", text, labels=LABELS)
                family.add_metric(self._labels, self._select(observed, bounds), self._values[f"{observed}_sum"])
                yield family

    def _select(self, observed: str, bounds: Sequence[float]) -> list[tuple[str, float]]:
        """Return vLLM's buckets of a histogram that has more. The counts are cumulative, so they stay the same."""
        counts = self._buckets[observed]
        return [*((str(bound), counts[bound]) for bound in bounds), ("+Inf", counts[math.inf])]

    def _gauges(self) -> Iterable[Metric]:
        counts = self._counts
        free = counts["num_free_pages"] + counts["num_evictable_pages"]
        usage = 1 - free / counts["num_pages"]
        for name, text, value in (
            ("num_requests_running", "Requests that are running.", counts["num_running_reqs"]),
            ("num_requests_waiting", "Requests in the queue.", counts["num_waiting_reqs"]),
            ("kv_cache_usage_perc", "Share of the KV pages in use, from 0 to 1.", usage),
        ):
            gauge = GaugeMetricFamily(f"vllm:{name}", text, labels=LABELS)
            gauge.add_metric(self._labels, value)
            yield gauge
        info = {"block_size": str(self._spec.page_size), "num_gpu_blocks": str(self._spec.num_pages), "engine": "0"}
        cache = GaugeMetricFamily("vllm:cache_config_info", "The KV pool.", labels=list(info))
        cache.add_metric(list(info.values()), 1)
        yield cache

    def _counters(self) -> Iterable[Metric]:
        counts = self._counts
        for name, text, value in (
            ("prompt_tokens", "Prompt tokens of the admitted requests.", counts["prompt_tokens"]),
            ("generation_tokens", "Output tokens.", counts["output_tokens"]),
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", counts["prompt_tokens"]),
            ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", counts["cached_prompt_tokens"]),
            ("num_preemptions", "Retractions of running requests.", counts["retractions"]),
        ):
            yield self._counter(name, text, value)

    def _counter(self, name: str, text: str, value: float) -> CounterMetricFamily:
        counter = CounterMetricFamily(f"vllm:{name}", text, labels=LABELS)
        counter.add_metric(self._labels, value)
        return counter

    def _drafts(self) -> Iterable[Metric]:
        """Yield the counts of speculative decoding. As in vLLM, there are none without it."""
        counts = self._counts
        positions = {
            int(name.removeprefix(PER_POSITION)): v for name, v in counts.items() if name.startswith(PER_POSITION)
        }
        if not positions:
            return
        for name, text, value in (
            ("spec_decode_num_drafts", "Verified runs of draft tokens.", counts["verification_rows"]),
            ("spec_decode_num_draft_tokens", "Verified draft tokens.", counts["draft_tokens"]),
            ("spec_decode_num_accepted_tokens", "Accepted draft tokens.", counts["accepted_draft_tokens"]),
        ):
            yield self._counter(name, text, value)
        each = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Accepted draft tokens by position in their run.",
            labels=[*LABELS, "position"],
        )
        for position, value in sorted(positions.items()):
            each.add_metric([*self._labels, str(position)], value)
        yield each
