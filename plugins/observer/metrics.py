"""An observer that measures queue time, time to first token, inter-token latency and end-to-end latency of requests.

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
    0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
    30.0, 60.0, 120.0, 300.0,
)  # fmt: skip
ROWS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0)


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
        self.rows = Histogram("minisgl_step_rows", "Requests that gained a token in a step", ROWS)
        self._arrival: dict[int, float] = {}  # uid of an open request -> its arrival time
        self._last_token: dict[int, float] = {}  # uid of an open request -> time of its last token
        self._waiting: set[int] = set()  # uids of requests that were never admitted
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    @hookimpl
    def minisgl_request_added(self, req: Req, now: float) -> None:
        self._arrival[req.uid] = now
        self._waiting.add(req.uid)

    @hookimpl
    def minisgl_batch_scheduled(self, step: Step, now: float) -> None:
        for admission in step.admissions:
            if admission.uid in self._waiting:  # not an admission after a retraction
                self._waiting.remove(admission.uid)
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
                    self.ttft.add(now - self._arrival[uid])
        last_token.update(dict.fromkeys(uids, now))
        self.rows.add(len(uids))

    @hookimpl
    def minisgl_request_finished(self, req: Req, now: float) -> None:
        self.e2e.add(now - self._arrival.pop(req.uid))
        self._last_token.pop(req.uid, None)
        self._waiting.discard(req.uid)

    @hookimpl
    def minisgl_metrics(self) -> str:
        return generate_latest(self._registry).decode()

    def collect(self) -> Iterable[Metric]:
        """Return all histograms, for the registry."""
        return [each.family() for each in (self.queue_time, self.ttft, self.itl, self.e2e, self.rows)]
