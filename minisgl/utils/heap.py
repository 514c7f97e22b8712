"""Memory that the C library keeps for this process although no object uses it."""

from __future__ import annotations

import ctypes


def trim_heap() -> None:
    """Return the heap's free memory to the operating system. Does nothing if the C library is not glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
