"""``python -m minisgl.cluster.attached``: a server that exits together with the program that started it.

The server takes the same options as ``python -m minisgl``. It exits when its standard input is closed, which the
operating system does however the program that started the server ends.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from typing import IO

from minisgl.cluster.process import when_input_closes
from minisgl.server.cli import main

READY = "minisgl is ready: "
"""The beginning of the line with the server's URL."""
MOST_LINES = 1000
"""The largest number of lines that are kept while they are held back. The last ones are kept."""
END_SECONDS = 5.0
"""Seconds that the last lines of a server that has ended have to arrive."""


class HeldLog:
    """The log of a server that another program started, for programs that write answers to the same terminal.

    It passes the lines on to standard error; between `hold` and `release`, it keeps them.

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


@contextlib.contextmanager
def attached_server(words: Sequence[str], log: HeldLog | None = None) -> Iterator[str]:
    """Start a server with the options ``words`` on a free port, yield its URL, and end the server at the exit.

    ``log`` gets the lines that the server writes to standard error; without it, they go there directly. Raise
    SystemExit with the server's exit status if the server can't start. The server has then printed the reason on
    standard error.
    """
    held = log or HeldLog([])
    process = subprocess.Popen(
        [sys.executable, "-m", "minisgl.cluster.attached", "server.port=0", *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=None if log is None else subprocess.PIPE,
        text=True,
        errors="replace",
        process_group=0,  # Ctrl-C in the terminal must reach the starting program only
    )
    assert process.stdin is not None
    assert process.stdout is not None
    if process.stderr is not None:
        held.read(process.stderr)
    try:
        url = read_url(process.stdout)
        if url is None:
            status = process.wait() or 1
            held.join()
            raise SystemExit(status)
        held.read(process.stdout)
        yield url
    finally:
        process.stdin.close()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        held.join()


def read_url(lines: IO[str]) -> str | None:
    """Return the URL that a server prints when it is ready, or None if its standard output ends before.

    Other lines are passed on to standard error: plugins and libraries may print, too.
    """
    for line in lines:
        other, ready, url = line.partition(READY)
        if other:
            print(other, end="\n" if ready else "", file=sys.stderr, flush=True)
        if ready:
            return url.strip()
    return None


if __name__ == "__main__":
    when_input_closes(lambda: os.kill(os.getpid(), signal.SIGINT))
    raise SystemExit(main())
