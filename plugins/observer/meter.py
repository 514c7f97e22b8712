"""An observer that times every request: from its arrival to its first token, and from each token to the next.

Exact for each request, where ``minisgl.plugins.observer.metrics`` counts in buckets. It listens where it is asked to:
``plugins=minisgl.plugins.observer.meter``. Knows the scheduler's clock and no other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from minisgl import hookimpl
from minisgl.core import Req

KEPT = 10_000  # requests that have ended; the oldest are forgotten


class Timing(NamedTuple):
    """One request, in seconds. ``ttft`` (time to first token) is None where it ended without a token."""

    uid: int
    ttft: float | None
    gaps: tuple[float, ...]  # from each token to the next: the inter-token latencies


class Meter:
    """``ended`` holds the timings of requests, in the order of their ends."""

    def __init__(self) -> None:
        self.arrived: dict[int, float] = {}  # open requests by uid
        self.tokens: dict[int, list[float]] = {}  # when each token came
        self.ended: deque[Timing] = deque(maxlen=KEPT)

    # lab: meter.clock
    @hookimpl
    def minisgl_request_added(self, req: Req, now: float) -> None:
        """A request arrived."""
        # 1. The client waits from now on, whether there is a seat for it or not.
        self.arrived[req.uid] = now
        self.tokens[req.uid] = []

    @hookimpl
    def minisgl_step_finished(self, reqs: Sequence[Req | None], now: float) -> None:
        """A step's tokens are known."""
        # 2. Only a row that gained a token counts: a chunk in the middle of a prompt gains none, and is None here.
        for req in reqs:
            if req is not None:
                self.tokens[req.uid].append(now)

    @hookimpl
    def minisgl_request_finished(self, req: Req) -> None:
        """A request ended, perhaps without a token: its client may have left."""
        # 3. Nothing of it stays with the open ones: a server runs for weeks.
        self.ended.append(self.timing(req.uid))
        del self.arrived[req.uid], self.tokens[req.uid]

    def timing(self, uid: int) -> Timing:
        """An open request's timing so far."""
        # 4. A gap is between two tokens of one request; how many others ran beside it changes nothing.
        times = self.tokens[uid]
        gaps = tuple(later - earlier for earlier, later in pairwise(times))
        return Timing(uid, times[0] - self.arrived[uid] if times else None, gaps)

    # lab: end

    @hookimpl
    def minisgl_metrics(self) -> str:
        """Of the requests that have ended: medians, 99th percentiles and the longest, as Prometheus summaries."""
        first = [timing.ttft for timing in self.ended if timing.ttft is not None]
        gaps = [gap for timing in self.ended for gap in timing.gaps]
        return "".join(
            [
                *summary("minisgl_meter_ttft_seconds", "From arrival to the first token", first),
                *summary("minisgl_meter_gap_seconds", "From one token of a request to its next", gaps),
            ]
        )


def summary(name: str, text: str, values: Sequence[float]) -> Iterator[str]:
    """Lines in Prometheus' text format; a quantile is a value that was seen."""
    yield f"# HELP {name} {text}\n# TYPE {name} summary\n"
    ordered = sorted(values)
    for quantile in (0.5, 0.99, 1.0):
        if ordered:
            yield f'{name}{{quantile="{quantile}"}} {float(ordered[int(quantile * (len(ordered) - 1))])!r}\n'
    yield f"{name}_sum {float(sum(ordered))!r}\n{name}_count {len(ordered)}\n"
