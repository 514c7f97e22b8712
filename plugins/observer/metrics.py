"""An observer that measures the times of requests: in the queue, to the first token, between tokens, to the end.

``/metrics`` shows them as histograms in Prometheus' text format. Counts of tokens, pages, steps and finished requests
come from `Scheduler.stats` instead.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from minisgl import hookimpl
from minisgl.core import Req, Step

SECONDS = (
    0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5,
    0.75, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 80.0, 120.0, 240.0, 300.0,
    480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
"""The buckets of times. They contain vLLM's, because the server exports the histograms under vLLM's names too."""
ROWS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0)
TOKENS = (1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0)


class Histogram:
    """A histogram that can add one value many times at once, unlike the histogram of prometheus_client.

    Many rows of a step have the same latency, so the histogram is updated once for all of them. ``bounds`` are the
    upper bounds of the buckets, in ascending order.
    """

    def __init__(self, name: str, text: str, bounds: Sequence[float]):
        self.name, self.text, self.bounds = name, text, bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, value: float, times: int = 1) -> None:
        """Count ``value`` as often as ``times`` says."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def family(self) -> HistogramMetricFamily:
        """Return the Prometheus metric, whose bucket counts are cumulative: all values up to the bucket's bound."""
        buckets, total = [], 0
        for bound, count in zip([*map(str, self.bounds), "+Inf"], self.counts, strict=True):
            total += count
            buckets.append((bound, total))
        return HistogramMetricFamily(self.name, self.text, buckets=buckets, sum_value=self.sum)


class Latencies(Collector):
    """Measures the latencies of every request, from its arrival to its end."""

    def __init__(self) -> None:
        self.queue_time = Histogram(
            "minisgl_request_queue_time_seconds", "Time from arrival to the first admission", SECONDS
        )
        self.ttft = Histogram("minisgl_time_to_first_token_seconds", "Time from arrival to the first token", SECONDS)
        self.itl = Histogram("minisgl_inter_token_latency_seconds", "Time between two tokens of a request", SECONDS)
        self.e2e = Histogram("minisgl_e2e_request_latency_seconds", "Time from arrival to the end", SECONDS)
        self.prefill_time = Histogram(
            "minisgl_request_prefill_time_seconds", "Time from the first admission to the first token", SECONDS
        )
        self.decode_time = Histogram(
            "minisgl_request_decode_time_seconds", "Time from the first token to the last", SECONDS
        )
        self.inference_time = Histogram(
            "minisgl_request_inference_time_seconds", "Time from the first admission to the last token", SECONDS
        )
        self.rows = Histogram("minisgl_step_rows", "Requests that gained a token in a step", ROWS)
        self.tokens = Histogram("minisgl_step_tokens", "Tokens that were computed in a step", TOKENS)
        self._arrival: dict[int, float] = {}  # uid of an open request -> its arrival time
        self._last_token: dict[int, float] = {}  # uid of an open request -> time of its last token
        self._first_token: dict[int, float] = {}  # uid of an open request -> time of its first token
        self._admitted: dict[int, float] = {}  # uid of an open request -> time of its first admission
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    @hookimpl
    def minisgl_request_added(self, req: Req, now: float) -> None:
        self._arrival[req.uid] = now

    @hookimpl
    def minisgl_batch_scheduled(self, step: Step, now: float) -> None:
        self.tokens.add(len(step.input_ids))
        for admission in step.admissions:
            if admission.uid not in self._admitted:  # not an admission after a retraction
                self._admitted[admission.uid] = now
                self.queue_time.add(now - self._arrival[admission.uid])

    @hookimpl
    def minisgl_step_finished(self, reqs: Sequence[Req | None], now: float) -> None:
        uids = [req.uid for req in reqs if req is not None]
        if not uids:
            return
        last_token = self._last_token
        previous_times = Counter(map(last_token.get, uids))
        first_tokens = previous_times.pop(None, 0)
        for previous, times in previous_times.items():
            if previous is not None:
                self.itl.add(now - previous, times)
        if first_tokens:
            for uid in uids:
                if uid not in last_token:
                    self._first_token[uid] = now
                    self.ttft.add(now - self._arrival[uid])
                    self.prefill_time.add(now - self._admitted[uid])
        last_token.update(dict.fromkeys(uids, now))
        self.rows.add(len(uids))

    @hookimpl
    def minisgl_request_finished(self, req: Req, now: float) -> None:
        self.e2e.add(now - self._arrival.pop(req.uid))
        admitted, first = self._admitted.pop(req.uid, None), self._first_token.pop(req.uid, None)
        last = self._last_token.pop(req.uid, None)
        if admitted is not None and first is not None and last is not None:
            self.decode_time.add(last - first)
            self.inference_time.add(last - admitted)

    @hookimpl
    def minisgl_metrics(self) -> str:
        return generate_latest(self._registry).decode()

    def collect(self) -> Iterable[Metric]:
        """Return all histograms, for the registry."""
        times = (self.queue_time, self.prefill_time, self.decode_time, self.inference_time)
        return [each.family() for each in (*times, self.ttft, self.itl, self.e2e, self.rows, self.tokens)]
