"""Ctrl-C (SIGINT) that waits until a piece of work is whole."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

__all__ = ["DeferredInterrupt"]


class DeferredInterrupt:
    """A context in which SIGINT (Ctrl-C) waits until `deliver` is called or the context ends.

    Then the handler that was installed before is called; Python's own raises KeyboardInterrupt. A second SIGINT that
    arrives while one waits calls that handler at once. In threads other than the main thread the context does nothing,
    because Python runs signal handlers in the main thread; the same holds if no handler written in Python is installed.
    """

    def __init__(self) -> None:
        self._previous: Callable[[int, FrameType | None], Any] | None = None
        self._waiting: tuple[int, FrameType | None] | None = None

    def __enter__(self) -> DeferredInterrupt:
        if threading.current_thread() is threading.main_thread():
            previous = signal.getsignal(signal.SIGINT)
            if callable(previous):
                self._previous = previous
                signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()
        self.deliver()

    def deliver(self) -> bool:
        """Call the previous handler if a SIGINT waits. Return whether it was called."""
        waiting, self._waiting = self._waiting, None
        if waiting is None or self._previous is None:
            return False
        self._previous(*waiting)
        return True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        assert self._previous is not None
        if self._waiting is None:
            self._waiting = (number, frame)
            return
        try:
            self._previous(number, frame)
        except BaseException:
            self._restore()
            self._waiting = None  # this exception stands for both
            raise

    def _restore(self) -> None:
        if self._previous is not None:
            found = signal.signal(signal.SIGINT, self._previous)
            if found != self._handle:  # another handler was installed in this context: keep it
                signal.signal(signal.SIGINT, found)
