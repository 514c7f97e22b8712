"""How slow the machine is now: the processor time of a fixed piece of work, compared with that of an idle machine.

A busy machine shares its cores and caches, so equal work takes more processor time. A limit of processor time that is
multiplied by `slowness` allows the same work on every machine.
"""

from __future__ import annotations

import time

__all__ = ["slowness"]

NOMINAL_SECONDS = 0.006
"""Processor time of `_work` on an idle core of a common server."""


def _work() -> int:
    """Compute something that takes about as long as an ordinary loop of a lab."""
    table: dict[int, int] = {}
    total = 0
    for i in range(60_000):
        total += i * 3 % 7
        table[i & 255] = total
    return total


def slowness() -> float:
    """Return how many times as long as nominal a piece of work takes now, at least 1."""
    started = time.thread_time()
    _work()
    return max(1.0, (time.thread_time() - started) / NOMINAL_SECONDS)
