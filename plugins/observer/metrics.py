"""An observer that measures waiting: for a seat, for the first token, for each next one, for the whole answer.

``/metrics`` shows it as histograms in Prometheus' text format. What the scheduler counts itself (tokens, pages, steps,
ends) is not repeated here.
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
    """Counts of values in buckets. Unlike prometheus_client's it takes a value many times at once: the rows of a step
    share theirs, and are not looked at one by one."""

    def __init__(self, name: str, text: str, bounds: Sequence[float]):
        self.name, self.text, self.bounds = name, text, bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def family(self) -> HistogramMetricFamily:
        """As Prometheus counts: each bucket holds what is at most its bound."""
        buckets, total = [], 0
        for bound, count in zip([*map(str, self.bounds), "+Inf"], self.counts, strict=True):
            total += count
            buckets.append((bound, total))
        return HistogramMetricFamily(self.name, self.text, buckets=buckets, sum_value=self.sum)


class Latencies(Collector):
    """Follows every request from its arrival to its end."""

    def __init__(self) -> None:
        self.queued = Histogram("minisgl_queue_seconds", "From a request's arrival to its first seat", SECONDS)
        self.first = Histogram("minisgl_first_token_seconds", "From a request's arrival to its first token", SECONDS)
        self.next = Histogram("minisgl_next_token_seconds", "From one token of a request to its next", SECONDS)
        self.whole = Histogram("minisgl_request_seconds", "From a request's arrival to its end", SECONDS)
        self.rows = Histogram("minisgl_step_rows", "Requests that gained a token in a step", ROWS)
        self._added: dict[int, float] = {}
        self._latest: dict[int, float] = {}  # when a request gained its last token
        self._waiting: set[int] = set()  # for their first seat
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    @hookimpl
    def minisgl_request_added(self, req: Req, now: float) -> None:
        self._added[req.uid] = now
        self._waiting.add(req.uid)

    @hookimpl
    def minisgl_batch_scheduled(self, step: Step, now: float) -> None:
        for seat in step.admissions:
            if seat.uid in self._waiting:  # else it was retracted, and comes back
                self._waiting.remove(seat.uid)
                self.queued.add(now - self._added[seat.uid])

    @hookimpl
    def minisgl_step_finished(self, reqs: Sequence[Req | None], now: float) -> None:
        uids = [req.uid for req in reqs if req is not None]
        if not uids:
            return
        latest = self._latest
        before = Counter(map(latest.get, uids))
        fresh = before.pop(None, 0)
        for then, times in before.items():
            if then is not None:
                self.next.add(now - then, times)
        if fresh:
            for uid in uids:
                if uid not in latest:
                    self.first.add(now - self._added[uid])
        latest.update(dict.fromkeys(uids, now))
        self.rows.add(len(uids))

    @hookimpl
    def minisgl_request_finished(self, req: Req, now: float) -> None:
        self.whole.add(now - self._added.pop(req.uid))
        self._latest.pop(req.uid, None)
        self._waiting.discard(req.uid)

    @hookimpl
    def minisgl_metrics(self) -> str:
        return generate_latest(self._registry).decode()

    def collect(self) -> Iterable[Metric]:
        return [each.family() for each in (self.queued, self.first, self.next, self.whole, self.rows)]
