"""Lab meter: How long does each request wait.

Grade it:  python -m minisgl.lab test meter     (`hint meter` for a hint)
Serve it:  python -m minisgl plugins=my_meter.py
"""

# minisgl lab meter, skeleton a667de059a (minisgl 0.2.0)

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


class MyMeter:
    """``ended`` holds the timings of requests, in the order of their ends."""

    def __init__(self) -> None:
        self.arrived: dict[int, float] = {}  # open requests by uid
        self.tokens: dict[int, list[float]] = {}  # when each token came
        self.ended: deque[Timing] = deque(maxlen=KEPT)

    @hookimpl
    def minisgl_request_added(self, req: Req, now: float) -> None:
        """A request arrived."""
        # TODO meter.clock
        # 1. The client waits from now on, whether there is a seat for it or not.
        raise NotImplementedError

    @hookimpl
    def minisgl_step_finished(self, reqs: Sequence[Req | None], now: float) -> None:
        """A step's tokens are known."""
        # TODO meter.clock
        # 2. Only a row that gained a token counts: a chunk in the middle of a prompt gains none, and is None here.
        raise NotImplementedError

    @hookimpl
    def minisgl_request_finished(self, req: Req) -> None:
        """A request ended, perhaps without a token: its client may have left."""
        # TODO meter.clock
        # 3. Nothing of it stays with the open ones: a server runs for weeks.
        raise NotImplementedError

    def timing(self, uid: int) -> Timing:
        """An open request's timing so far."""
        # TODO meter.clock
        # 4. A gap is between two tokens of one request; how many others ran beside it changes nothing.
        raise NotImplementedError

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
