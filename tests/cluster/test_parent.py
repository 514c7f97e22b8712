"""A process that ends together with the process that started it."""

from __future__ import annotations

import subprocess
import sys

WATCHED = "import os; from minisgl.cluster.process import when_input_closes; when_input_closes(lambda: os._exit(3))\n"


def start(program: str) -> subprocess.Popen[bytes]:
    """Start a Python process with pipes to its standard streams."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-c", WATCHED + program], **pipes)  # type: ignore[call-overload, no-any-return]


def test_closed_input_ends_the_process() -> None:
    with start("import time; print('up', flush=True); time.sleep(600)") as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == b"up\n"
        process.stdin.close()
        assert process.wait() == 3


def test_a_process_that_is_done_ends_as_usual() -> None:
    """The waiting thread must not hold the lock of sys.stdin: Python would abort at its end, with status -6."""
    with start("import time; time.sleep(0.3); print('done')") as process:
        assert process.wait() == 0
        assert process.stdout is not None
        assert process.stdout.read() == b"done\n"
