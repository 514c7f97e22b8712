"""How busy the client processes were, and whether they were the limit of a measurement.

A client that is late measures itself: it sends a request after its time, or it reads a token some time after the token
arrived. Three values show this: the share of a CPU that each process used, the time by which its event loop woke up
late, and the time by which requests were sent late.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from minisgl.bench.loadgen.http import OWN_LACK
from minisgl.bench.loadgen.plan import WorkerResult

MAX_CPU_SHARE = 0.8
"""A client process that uses more than this share of a CPU was the limit."""
MIN_DELAY = 0.005
"""Delays of the client below this number of seconds are never reported as its limit."""
MAX_SHARE_OF_METRIC = 0.2
"""A delay of the client (p99) is too long if it is above this share of the metric that it falsifies."""


@dataclass(frozen=True)
class ClientLoad:
    """The load of all client processes; times in milliseconds. ``limits`` says why the client was the limit."""

    processes: int
    max_cpu_share: float
    p50_loop_lag_ms: float
    p99_loop_lag_ms: float
    max_loop_lag_ms: float
    p50_send_delay_ms: float
    p99_send_delay_ms: float
    max_send_delay_ms: float
    limits: list[str] = field(default_factory=list)

    def plain(self) -> dict[str, Any]:
        """Return the fields as a dict, for JSON."""
        return asdict(self)


def client_load(results: Sequence[WorkerResult], ttft: float, itl: float) -> ClientLoad:
    """Return the load of the client processes.

    ``ttft`` and ``itl`` are the seconds against which delays are judged: the median TTFT, and the 99th percentile of
    the ITL (0 if there is none).
    """
    shares = [result.cpu_seconds / result.wall_seconds if result.wall_seconds else 0.0 for result in results]
    lag = _percentiles([lag for result in results for lag in result.lags])
    records = [record for result in results for record in result.records if record.due is not None]
    delay = _percentiles([record.start - record.due for record in records if record.due is not None])
    limits = []
    if (share := max(shares, default=0.0)) > MAX_CPU_SHARE:
        limits.append(f"a client process used {share:.0%} of a CPU: set processes= to more than {len(results)}")
    busy = "" if limits else f", although it used {share:.0%} of a CPU: other programs compete for the CPUs"
    if _too_long(lag[1], min(filter(None, (ttft, itl)), default=0.0)):
        limits.append(f"a client's event loop woke up {lag[1] * 1e3:.1f} ms late (p99){busy}")
    if _too_long(delay[1], ttft):
        limits.append(f"requests were sent {delay[1] * 1e3:.1f} ms late (p99)")
    if lacking := sum(r.error.startswith(OWN_LACK) for result in results for r in result.records):
        limits.append(f"{lacking:,} requests failed because the client has no file descriptor or port left")
    return ClientLoad(
        processes=len(results),
        max_cpu_share=share,
        p50_loop_lag_ms=lag[0] * 1e3,
        p99_loop_lag_ms=lag[1] * 1e3,
        max_loop_lag_ms=lag[2] * 1e3,
        p50_send_delay_ms=delay[0] * 1e3,
        p99_send_delay_ms=delay[1] * 1e3,
        max_send_delay_ms=delay[2] * 1e3,
        limits=limits,
    )


def _percentiles(seconds: Sequence[float]) -> tuple[float, float, float]:
    values = np.array(seconds or [0.0])
    return float(np.percentile(values, 50)), float(np.percentile(values, 99)), float(values.max())


def _too_long(delay: float, metric: float) -> bool:
    return delay > max(MIN_DELAY, MAX_SHARE_OF_METRIC * metric)
