"""Runs a module of the course in a child process, with JSON in and JSON out: the code of a student runs there."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

import psutil

from minisgl.chapters.lab.signals import signals_raise

__all__ = ["ChildError", "ask_child", "end_family"]


class ChildError(Exception):
    """A child process gave no answer. The text says why: the last line of its standard error, or that it took long."""


def ask_child(module: str, request: Any, seconds: float, env: Mapping[str, str] | None = None) -> Any:
    """Run ``python -m module`` with ``request`` as JSON on its standard input, and return its last line, read as JSON.

    ``env`` is added to the environment. Raise `ChildError` if the child fails, or is not done after ``seconds``. The
    child ends with all processes that it has started.
    """
    command, environment = [sys.executable, "-m", module], {**os.environ, **(env or {})}
    # Files, not pipes: a process that the child left behind would keep a pipe open, and its reader waiting.
    with (
        tempfile.TemporaryFile("w+") as given,
        tempfile.TemporaryFile("w+") as out,
        tempfile.TemporaryFile("w+") as err,
    ):
        given.write(json.dumps(request))
        given.seek(0)
        process = subprocess.Popen(
            command, stdin=given, stdout=out, stderr=err, env=environment, start_new_session=True
        )
        with signals_raise():
            try:
                process.wait(seconds)
            except subprocess.TimeoutExpired:
                raise ChildError(f"it was not done after {seconds:.0f} s") from None
            finally:
                end_family(process)
        out.seek(0)
        err.seek(0)
        lines, said = out.read().splitlines(), err.read()
    if process.returncode or not lines:
        raise ChildError((said.strip().splitlines() or ["its process has ended"])[-1])
    return json.loads(lines[-1])


def end_family(process: subprocess.Popen[Any]) -> None:
    """Kill a child that leads a session, and every process that it has started, and wait for its end.

    A process that has left the session is found only while its parents live.
    """
    family = []
    if process.poll() is None:
        with contextlib.suppress(psutil.NoSuchProcess):
            family = psutil.Process(process.pid).children(recursive=True)
    with contextlib.suppress(ProcessLookupError):  # raised when no process of the session is left
        os.killpg(process.pid, signal.SIGKILL)
    for each in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
    process.wait()
