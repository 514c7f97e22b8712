"""Signals that end a program as Ctrl-C does: the program's ``finally`` clauses run, which end its child processes."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

__all__ = ["signals_raise"]


@contextlib.contextmanager
def signals_raise() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise SystemExit in the main thread, with the status 128 plus the signal's number.

    In another thread than the main thread, nothing is changed. A signal that is ignored, as after ``nohup``, stays so.
    """

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, leave)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
