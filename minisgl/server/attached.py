"""``python -m minisgl.server.attached``: a server that exits together with the program that started it.

The server takes the same options as ``python -m minisgl``. It exits when its standard input is closed, which the
operating system does however the program that started the server ends.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import IO

from minisgl.server.cli import main
from minisgl.server.held_log import HeldLog
from minisgl.utils.parent import when_input_closes

READY = "minisgl is ready: "
"""The beginning of the line with the server's URL."""


@contextlib.contextmanager
def attached_server(words: Sequence[str], log: HeldLog | None = None) -> Iterator[str]:
    """Start a server with the options ``words`` on a free port, yield its URL, and end the server at the exit.

    ``log`` gets the lines that the server writes to standard error; without it, they go there directly. Raise
    SystemExit with the server's exit status if the server can't start. The server has then printed the reason on
    standard error.
    """
    held = log or HeldLog([])
    process = subprocess.Popen(
        [sys.executable, "-m", "minisgl.server.attached", "server.port=0", *words],
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
