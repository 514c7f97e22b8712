"""Returns the free memory of the heap to the operating system when a server has been idle for a second.

On a CPU the activations of a large step are heap memory, which the C library keeps: about 90 MiB for 8192 tokens of
``tutor`` (docs/design/cpu-memory.md).
"""

from __future__ import annotations

import ctypes
import threading

from minisgl.hooks import hookimpl
from minisgl.message.link import Link

IDLE_SECONDS = 1.0
"""Seconds without an open request after which the heap is trimmed."""


@hookimpl
def minisgl_observer(link: Link | None) -> object | None:
    return None if link is None else HeapTrimmer()


class HeapTrimmer:
    """Trims the heap of a server's rank 0 in a thread of its own, once after the last request has ended."""

    def __init__(self) -> None:
        self._num_open, self._closed = 0, False
        self._ended = threading.Event()  # a request has ended since the last wait
        threading.Thread(target=self._run, name="heap-trimmer", daemon=True).start()

    @hookimpl
    def minisgl_request_added(self) -> None:
        self._num_open += 1

    @hookimpl
    def minisgl_request_finished(self) -> None:
        self._num_open -= 1
        self._ended.set()

    @hookimpl
    def minisgl_closed(self) -> None:
        self._closed = True
        self._ended.set()

    def _run(self) -> None:
        while self._ended.wait() and not self._closed:
            self.trim_when_idle()

    def trim_when_idle(self) -> None:
        """Wait until no request has ended for `IDLE_SECONDS`. Then trim the heap, unless a request is open."""
        while self._ended.is_set() and not self._closed:
            self._ended.clear()
            self._ended.wait(IDLE_SECONDS)
        if not self._num_open and not self._closed:
            trim_heap()


def trim_heap() -> None:
    """Return the heap's free memory to the operating system. Does nothing if the C library is not glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
