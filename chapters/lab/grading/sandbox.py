"""The student's processes of one submission: sessions for calls and gates, and the real server.

Knows `minisgl.chapters.lab.grading.student_side` only by its command line and its messages.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from minisgl.chapters.lab.grading.wire import Channel

__all__ = ["Sandbox", "SandboxFailed"]

START_SECONDS = 120.0
"""Seconds that the student's process has to start, before it has seen the student's file."""


class SandboxFailed(RuntimeError):  # noqa: N818
    """The student's process can't be started. This is a failure of the grader, not of the submission."""


class Sandbox:
    """Starts sessions in a confined process, one at a time. ``words`` are the words before a confined command."""

    def __init__(self, words: Sequence[str], python: Path, modules: Sequence[str], log: Path):
        self.words, self.python, self.modules, self.log = list(words), python, list(modules), log
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._running = False

    def _start_process(self) -> None:
        """Start the process that forks the sessions. It has not seen the student's file yet."""
        self.close()
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        module = "minisgl.chapters.lab.grading.student_side"
        command = [*self.words, str(self.python), "-m", module, str(theirs.fileno()), *self.modules]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=[theirs.fileno()]
            )
        theirs.close()
        self._control = mine
        if self._heard(START_SECONDS) != b"ready":
            with self.log.open("rb") as log:
                log.seek(-min(self.log.stat().st_size, 1000), os.SEEK_END)
                end = log.read().decode("utf-8", errors="replace")
            self.close()
            raise SandboxFailed(f"the confined process did not start: {' '.join(end.split()) or 'no message'}")

    def _heard(self, seconds: float) -> bytes:
        """Return the next message of the process, or an empty one if there is none."""
        assert self._control is not None
        if not select.select([self._control], [], [], seconds)[0]:
            return b""
        with contextlib.suppress(OSError):
            return self._control.recv(1 << 16)
        return b""

    def start(self, request: Mapping[str, Any]) -> Channel:
        """Start a session and return the grader's end of its channel."""
        if self._running:
            self.end()
        if self._process is None or self._process.poll() is not None:
            self._start_process()
        assert self._control is not None
        mine, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._control, [json.dumps(dict(request)).encode()], [theirs.fileno()])
            except OSError:  # the student's code has ended the process
                self._start_process()
                socket.send_fds(self._control, [json.dumps(dict(request)).encode()], [theirs.fileno()])
        self._running = True
        return Channel(mine)

    def end(self) -> int:
        """Kill the session and everything that it has started. Return its exit status."""
        if not self._running or self._control is None:
            return 0
        self._running = False
        time.sleep(0.02)  # a session that is ending by itself may still report its status
        if select.select([self._control], [], [], 0)[0]:
            told = self._heard(0)
        else:
            with contextlib.suppress(OSError):
                self._control.send(b"end")
            told = self._heard(20.0)
        try:
            return int(json.loads(told)["status"])
        except (ValueError, TypeError, KeyError):
            self.close()
            return -9

    def close(self) -> None:
        """End the process and all its sessions."""
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None
        self._running = False
