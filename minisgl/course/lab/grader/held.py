"""What an object keeps and costs, wherever the object is: sizes of its containers, allocated bytes, processor time.

An object of another process, as under ``lab grade``, has the methods ``__container_sizes__``, ``__cpu_seconds__``,
``__trace__`` and ``__traced__``, and answers for its process.
"""

from __future__ import annotations

import time
import tracemalloc
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

__all__ = ["container_sizes", "cpu_clock", "traced"]


def container_sizes(owner: Any) -> dict[str, int]:
    """Return the number of elements in each container of an object, except deques with a ``maxlen``: name → number."""
    remote = getattr(type(owner), "__container_sizes__", None)
    if remote is not None:
        sizes: dict[str, int] = remote(owner)
        return sizes
    kinds = (dict, list, set, tuple, deque, np.ndarray)
    held = {name: value for name, value in vars(owner).items() if getattr(value, "maxlen", None) is None}
    return {name: len(value) for name, value in held.items() if isinstance(value, kinds)}


def cpu_clock(owner: Any) -> Callable[[], float]:
    """Return a clock of the processor time, in seconds, that the calls of an object's methods use."""
    remote = getattr(type(owner), "__cpu_seconds__", None)
    return time.thread_time if remote is None else lambda: float(remote(owner))


@contextmanager
def traced(owner: Any) -> Iterator[Callable[[], int]]:
    """Trace the allocations of an object's process, and yield a function that returns the bytes allocated now."""
    kind: Any = type(owner)
    if hasattr(kind, "__trace__"):
        kind.__trace__(owner, True)
        try:
            yield lambda: int(kind.__traced__(owner))
        finally:
            kind.__trace__(owner, False)
        return
    tracemalloc.start()
    try:
        yield lambda: tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
