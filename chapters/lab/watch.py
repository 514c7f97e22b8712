"""Grades a file again whenever it is saved: the command ``watch``."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from minisgl.chapters.lab.grader.grade import fingerprint
from minisgl.chapters.lab.signals import signals_raise

__all__ = ["watch"]

POLL_SECONDS = 0.25
"""Seconds between two looks at the file."""
END_SECONDS = 20.0
"""Seconds that a grader, which was interrupted because the file was saved again, has to end its server."""


def watch(path: Path, command: Sequence[str], before_run: Callable[[], None]) -> None:
    """Run ``command``, which grades ``path``, now and after every save, until it exits with status 0.

    If the file is saved while the command runs, the command is interrupted and run again. ``before_run`` is called
    before every run. ``path`` may be a folder: then a save of any file in it counts.
    """
    with signals_raise():
        while True:
            version = _version(path)
            before_run()
            # In a new session: Ctrl-C reaches this process only, which then ends the command.
            process = subprocess.Popen(command, start_new_session=True)
            try:
                while process.poll() is None and not _saved(path, version):
                    time.sleep(POLL_SECONDS)
            finally:
                _end(process)
            if process.returncode == 0:
                return
            while not _saved(path, version):
                time.sleep(POLL_SECONDS)


def _version(path: Path) -> str | None:
    """Return a hash of the file's content, or None while there is no such file, as in the middle of a save."""
    try:
        return fingerprint(path)
    except OSError:
        return None


def _saved(path: Path, version: str | None) -> bool:
    now = _version(path)
    return now is not None and now != version


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a command that still runs, with all processes that it has started. A second signal kills them at once."""
    if process.poll() is not None:
        return
    try:
        process.send_signal(signal.SIGINT)
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        pass
    finally:
        with contextlib.suppress(ProcessLookupError):  # raised when no process of the session is left
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
