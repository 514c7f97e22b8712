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

from minisgl.server.cli import main
from minisgl.utils.parent import when_input_closes


@contextlib.contextmanager
def attached_server(words: Sequence[str]) -> Iterator[str]:
    """Start a server with the options ``words`` on a free port, yield its URL, and end the server at the exit.

    Raise SystemExit with the server's exit status if the server can't start. The server has then printed the reason on
    standard error.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "minisgl.server.attached", "server.port=0", *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        process_group=0,  # Ctrl-C in the terminal must reach the starting program only
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        if "http" not in line:
            raise SystemExit(process.wait() or 1)
        yield line[line.index("http") :].strip()
    finally:
        process.stdin.close()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


if __name__ == "__main__":
    when_input_closes(lambda: os.kill(os.getpid(), signal.SIGINT))
    raise SystemExit(main())
