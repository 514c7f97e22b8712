"""How every child process of a server begins and ends, whatever it does in between.

A child tells the launcher once that it is ready, or why it failed; it leaves the keyboard's signals to the launcher;
and it ends when the launcher does, however that died (promise 10).
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import msgspec

from minisgl.config import ConfigError
from minisgl.core import EngineSpec

PATIENCE = 0.2
"""Seconds between a failure and its traceback. Where it is only the echo of another process' death, the launcher has
ended this one by then, and that death stands alone in the log."""
CALLS_SECONDS = 0.25
"""How old a child's counts of calls may be."""
SHOW_STACK = signal.SIGUSR1
"""At this signal a child writes to standard error where it is, even while something holds its interpreter."""


class Ready(msgspec.Struct, tag=True, array_like=True):
    """A child can work now. ``plugins``: what it loaded, each as name, path and SHA-256. ``spec``: what its engine
    can hold."""

    plugins: list[tuple[str, str, str]] = []
    spec: EngineSpec | None = None


class Failed(msgspec.Struct, tag=True, array_like=True):
    """A child ends. ``options``: somebody has to change the options, and the message says which."""

    message: str
    options: bool = False


class Called(msgspec.Struct, tag=True, array_like=True):
    """How often a child has called plugins so far: each as name, path, SHA-256, what was called, times."""

    calls: list[tuple[str, str, str, str, int]]


News = Ready | Failed | Called


class Report:
    """A child's line to the launcher."""

    def __init__(self, pipe: Connection):
        self._pipe = pipe
        self._lock = threading.Lock()

    def send(self, news: News) -> None:
        with self._lock, contextlib.suppress(OSError):  # the launcher is gone, and so will we be
            self._pipe.send_bytes(msgspec.msgpack.encode(news))

    def keep_sending(self, calls: Callable[[], list[tuple[str, str, str, str, int]]]) -> None:
        """From now on, tell of ``calls()`` whenever it has changed, within `CALLS_SECONDS`."""

        def tell() -> None:
            told = calls()
            while True:
                time.sleep(CALLS_SECONDS)
                if (now := calls()) != told:
                    self.send(Called(now))
                    told = now

        threading.Thread(target=tell, name="calls", daemon=True).start()


def read_report(pipe: Connection) -> News | None:
    """The launcher's end: the next news that is here already, or None. Raises EOFError where the child hung up."""
    return msgspec.msgpack.decode(pipe.recv_bytes(), type=News) if pipe.poll() else None


def child_main(role: str, body: Callable[..., None], pipe: Connection, *args: Any) -> None:
    """What a child process runs: ``body(report, *args)``, and a report of what it raised."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM))
    faulthandler.register(SHOW_STACK, all_threads=False)
    with contextlib.suppress(OSError), open("/proc/self/comm", "w") as name:
        name.write(role[:15])  # what ps and top show on Linux
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent.sentinel,), name="parent-watch", daemon=True).start()
    report = Report(pipe)
    try:
        body(report, *args)
    except ConfigError as error:
        report.send(Failed(str(error), options=True))
        sys.exit(2)
    except BaseException as error:
        report.send(Failed(f"{type(error).__name__}: {error}"))
        time.sleep(PATIENCE)
        traceback.print_exc()
        sys.exit(1)


def _end_with(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)
