"""How far two token sequences agree, in whole pages: what a prefix cache asks at every edge it walks.

In numpy, and in C++ (`minisgl/kernel/cpp/compare.cpp`), which spares the two passes and the array between them.
"""

from __future__ import annotations

from collections.abc import Callable

from minisgl.config import ConfigError
from minisgl.core import I64

CommonPages = Callable[[I64, I64, int], int]
"""``f(a, b, page_size)``: whole pages that a and b, both int64 [ids], have in common at their start."""

ROADS = ("auto", "numpy", "cpp")


def common_pages(a: I64, b: I64, page_size: int) -> int:
    """`CommonPages` in numpy."""
    n = min(len(a), len(b))
    differs = a[:n] != b[:n]
    first = int(differs.argmax()) if n else 0
    return (first if n and differs[first] else n) // page_size


def pick_common_pages(road: str) -> CommonPages:
    """The function for ``road``: ``numpy``, ``cpp``, or ``auto``: C++ where it can be compiled, else numpy.

    Raises `ConfigError` for any other word, and where ``cpp`` was asked for and can't be had.
    """
    if road not in ROADS:
        raise ConfigError(f"compare={road} is unknown: use {', '.join(ROADS)}.")
    if road == "numpy":
        return common_pages
    from minisgl.kernel.cpp import load

    try:
        compiled: CommonPages = load("compare.cpp").common_pages
    except ConfigError:
        if road == "auto":
            return common_pages
        raise

    def in_cpp(a: I64, b: I64, page_size: int) -> int:
        if a.flags.writeable and b.flags.writeable:
            return compiled(a, b, page_size)
        return common_pages(a, b, page_size)  # an array that is read-only can't be handed over

    return in_cpp
