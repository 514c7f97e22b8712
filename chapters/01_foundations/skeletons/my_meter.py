"""Lab meter: How long each request waits.

Grade it:  python -m minisgl.lab test meter     (`hint meter` for a hint)
Serve it:  python -m minisgl plugins=my_meter.py
"""

# minisgl lab meter, skeleton d576d018ae (minisgl 0.2.0)

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from minisgl import hookimpl
from minisgl.core import Req

KEPT = 10_000  # finished requests whose timings are kept; older ones are dropped, with all their gaps


class Timing(NamedTuple):
    """The timing of one request, in seconds. ``ttft`` is None as long as the request has no token.

    ``gaps`` may also be another sequence, if the sequence does not change later.
    """

    uid: int
    ttft: float | None
    gaps: tuple[float, ...]  # inter-token latencies: from each token to the next


class MyMeter:
    """Records the timing of every request. ``ended`` holds those of finished requests, in the order of their ends.

    The gates read ``ended``, which may be a property, and call `timing` of open requests. ``arrived`` and ``tokens``
    may be replaced. No two requests have the same uid. Several hook calls may have the same ``now``. If memory runs
    out, a request is retracted and runs again later. It is still the same request.
    """

    def __init__(self) -> None:
        self.arrived: dict[int, float] = {}  # uid of an open request -> its arrival time
        self.tokens: dict[int, list[float]] = {}  # uid of an open request -> the time of each of its tokens
        self.ended: deque[Timing] = deque(maxlen=KEPT)

    @hookimpl
    def minisgl_request_added(self, req: Req, now: float) -> None:
        """Record the arrival of a request."""
        # TODO meter.clock
        # 1. TTFT starts at arrival. It includes the time in the waiting queue.
        raise NotImplementedError

    @hookimpl
    def minisgl_step_finished(self, reqs: Sequence[Req | None], now: float) -> None:
        """Record the time of each token that a step sampled."""
        # TODO meter.clock
        # 2. Count only rows that gained a token. `reqs` has None for the others, such as a chunk that ends no prompt.
        #    A row that gained several tokens at once, with speculative decoding, counts as one time.
        raise NotImplementedError

    @hookimpl
    def minisgl_request_finished(self, req: Req) -> None:
        """Move a request from the open to the ended ones. An aborted request may have no token."""
        # TODO meter.clock
        # 3. Delete all state of the open request, and keep no reference to `req`. Otherwise a server that runs for
        #    weeks would run out of memory.
        raise NotImplementedError

    def timing(self, uid: int) -> Timing:
        """Return the timing of an open request so far, also before its first token."""
        # TODO meter.clock
        # 4. A gap is the time between two tokens of the same request.
        raise NotImplementedError

    @hookimpl
    def minisgl_metrics(self) -> str:
        """Return median, 99th percentile and maximum over the finished requests, as Prometheus summaries."""
        first = [timing.ttft for timing in self.ended if timing.ttft is not None]
        gaps = [gap for timing in self.ended for gap in timing.gaps]
        return "".join(
            [
                *summary("minisgl_meter_ttft_seconds", "Time from arrival to first token", first),
                *summary("minisgl_meter_inter_token_latency_seconds", "Time between two tokens of a request", gaps),
            ]
        )


def summary(name: str, text: str, values: Sequence[float]) -> Iterator[str]:
    """Yield the lines of a summary in Prometheus' text format. Each quantile is one of ``values``."""
    yield f"# HELP {name} {text}\n# TYPE {name} summary\n"
    ordered = sorted(values)
    for quantile in (0.5, 0.99, 1.0):
        if ordered:
            yield f'{name}{{quantile="{quantile}"}} {float(ordered[int(quantile * (len(ordered) - 1))])!r}\n'
    yield f"{name}_sum {float(sum(ordered))!r}\n{name}_count {len(ordered)}\n"
