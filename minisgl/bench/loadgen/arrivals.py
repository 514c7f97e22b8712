"""When requests are sent: arrival times in seconds from the start of the measurement."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]


def arrival_times(count: int, rate: float, burstiness: float = 1.0, seed: int = 0) -> F64:
    """Return ``count`` arrival times at ``rate`` requests per second, in ascending order.

    The times between requests have a gamma distribution with the shape ``burstiness`` and the mean ``1 / rate``: with
    burstiness 1 an exponential distribution, so that arrivals are a Poisson process. The times are scaled so that the
    last request arrives after exactly ``count / rate`` seconds, as in ``vllm bench serve``: otherwise, the rate of a
    short run depends on its seed. With an infinite rate, all times are 0.
    """
    if math.isinf(rate):
        return np.zeros(count)
    if math.isinf(burstiness):
        return np.arange(1, count + 1) / rate
    times = np.cumsum(np.random.default_rng(seed).gamma(burstiness, 1.0 / (rate * burstiness), count))
    return times * (count / rate / times[-1]) if count else times


def replay_times(timestamps: F64, speed: float = 1.0) -> F64:
    """Return the arrival times of a trace that is played ``speed`` times as fast. The first request arrives at 0."""
    if not len(timestamps):
        return timestamps
    return np.asarray((timestamps - timestamps[0]) / speed)
