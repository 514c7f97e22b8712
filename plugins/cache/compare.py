"""The length of the common prefix of two token sequences, in whole pages.

A radix cache calls this for every edge that a lookup walks. There are two implementations: numpy, and C++
(`plugins/kernels/ops/cpp/compare.cpp`). The C++ version reads the ids once and allocates no intermediate array; the
numpy version writes a boolean array of the comparison's results and searches it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from minisgl.config import ConfigError
from minisgl.core import I32

CommonPages = Callable[[I32, I32, int], int]
"""``f(a, b, page_size)`` returns how many whole pages a and b (int32, one-dimensional) share at their start."""

ALGORITHMS = ("auto", "numpy", "cpp")


def common_pages(a: I32, b: I32, page_size: int) -> int:
    """Count the common leading pages of a and b in numpy: see `CommonPages`."""
    n = min(len(a), len(b))
    differs = a[:n] != b[:n]
    first = int(differs.argmax()) if n else 0
    return (first if n and differs[first] else n) // page_size


def pick_common_pages(algorithm: str) -> CommonPages:
    """Return the implementation named ``algorithm``: ``numpy``, ``cpp`` or ``auto``.

    ``auto`` is C++ if it can be compiled on this machine, else numpy. Raises `ConfigError` for any other name, and for
    ``cpp`` if it can't be compiled.
    """
    if algorithm not in ALGORITHMS:
        raise ConfigError(f"compare={algorithm} is unknown: use {', '.join(ALGORITHMS)}.")
    if algorithm == "numpy":
        return common_pages
    try:
        return common_pages_in_cpp()
    except ConfigError:
        if algorithm == "auto":
            return common_pages
        raise


@functools.cache
def common_pages_in_cpp() -> CommonPages:
    """Compile and load the C++ implementation, once in a process. Raise `ConfigError` if that is not possible here."""
    try:
        from minisgl.plugins.kernels.ops.cpp import load
    except ModuleNotFoundError:
        raise ConfigError("cache.compare=cpp needs plugins/kernels: use cache.compare=numpy.") from None

    compiled: CommonPages = load("compare.cpp").common_pages

    def in_cpp(a: I32, b: I32, page_size: int) -> int:
        if a.flags.writeable and b.flags.writeable:
            return compiled(a, b, page_size)
        return common_pages(a, b, page_size)  # a read-only array can't be passed through DLPack

    return in_cpp
