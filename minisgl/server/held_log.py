"""The log of a server that another program started, for programs that write answers to the same terminal."""

from __future__ import annotations

import sys
import threading
from collections import deque
from typing import IO

__all__ = ["HeldLog"]

MOST_LINES = 1000
"""The largest number of lines that are kept while they are held back. The last ones are kept."""
END_SECONDS = 5.0
"""Seconds that the last lines of a server that has ended have to arrive."""


class HeldLog:
    """Passes the lines that a server writes on to standard error; between `hold` and `release`, it keeps them.

    So no line of the log is written into the middle of an answer. ``always``: the user asked for the log, so the caller
    shows the lines after each answer, and not only after an error.
    """

    def __init__(self, words: list[str]):
        self.always = any(word.lstrip("+").startswith(("log_level=", "log_format=")) for word in words)
        self._lock = threading.Lock()
        self._held = False
        self._kept: deque[str] = deque(maxlen=MOST_LINES)
        self._threads: list[threading.Thread] = []

    def read(self, lines: IO[str]) -> None:
        """Read a pipe of the server in a thread, until the server has ended. A full pipe would block the server."""
        thread = threading.Thread(target=self._read, args=(lines,), name="server-log", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _read(self, lines: IO[str]) -> None:
        with lines:
            for line in lines:
                with self._lock:
                    if self._held:
                        self._kept.append(line)
                    else:
                        _write(line)

    def hold(self) -> None:
        """Keep lines from now on."""
        with self._lock:
            self._held = True

    def release(self) -> None:
        """Write the lines that were kept, and pass lines on again."""
        with self._lock:
            self._held = False
            while self._kept:
                _write(self._kept.popleft())

    def join(self) -> None:
        """Wait a short time for the last lines of a server that has ended."""
        for thread in self._threads:
            thread.join(END_SECONDS)


def _write(line: str) -> None:
    try:
        sys.stderr.write(line)
        sys.stderr.flush()
    except (OSError, ValueError):  # standard error is closed; the pipe must be read all the same
        pass
