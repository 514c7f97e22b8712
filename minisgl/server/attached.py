"""``python -m minisgl.server.attached``: a server that belongs to the program which started it.

It takes the same options as ``python -m minisgl``, and ends when its standard input does: however its owner ends.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence

from minisgl.server.cli import main


@contextlib.contextmanager
def attached_server(words: Sequence[str]) -> Iterator[str]:
    """Start a server with these options on a free port; yields its URL. Raises SystemExit with its exit status where
    it does not come up (it has said why on standard error)."""
    process = subprocess.Popen(
        [sys.executable, "-m", "minisgl.server.attached", "server.port=0", *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        process_group=0,  # the keyboard's interrupt is for its owner
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


def _end_with_input() -> None:
    while os.read(0, 4096):  # not through sys.stdin, whose lock a thread must not hold when the program ends
        pass
    os.kill(os.getpid(), signal.SIGINT)


if __name__ == "__main__":
    threading.Thread(target=_end_with_input, daemon=True).start()
    raise SystemExit(main())
