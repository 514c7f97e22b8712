"""``python -m minisgl`` as a user starts it, for tests: a real launcher with its real processes and sockets.

Knows the command line and what a server prints, and psutil; imports nothing of the server's own.
"""

from __future__ import annotations

import contextlib
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

import psutil

__all__ = ["Server", "patience"]

_SAMPLE = re.compile(r"^(\w+)(\{.*\})? (\S+)$", re.MULTILINE)


def patience(seconds: float) -> float:
    """``seconds`` on a machine with a core to spare; longer by as much as this one is overloaded."""
    return seconds * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


class Server:
    """A server on a free port; use it as a context manager. Raises RuntimeError where it does not come up.

    ``words`` are options as on the command line. ``wait=False`` does not wait for it to be ready. ``attached``: it
    ends with this process, however that ends.
    """

    def __init__(
        self,
        *words: str,
        wait: bool = True,
        timeout: float = 90.0,
        env: Mapping[str, str] | None = None,
        attached: bool = False,
    ):
        self.folder = Path(tempfile.mkdtemp(prefix="minisgl-test-"))  # the server's own place for temporary files
        self._stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed in close()
        module = "minisgl.server.attached" if attached else "minisgl"
        command = [sys.executable, "-m", module, "device=cpu", "server.port=0", *words]
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            # Tests that a shell started in the background ignore Ctrl-C, and a child would from its first moment.
            signal.signal(signal.SIGINT, signal.default_int_handler)
        self.started = time.monotonic()
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE if attached else None,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(self.folder), **(env or {})},
            start_new_session=True,
        )
        self.url = ""
        self.family: list[psutil.Process] = []  # its processes when they were looked at last
        self.things: set[str] = set()  # the sockets and shared memory that they had then
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        if wait:
            try:
                self.wait_until_ready(timeout)
            except BaseException:
                self.close()
                raise

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def wait_until_ready(self, timeout: float = 90.0) -> None:
        """Until it says that it is ready."""
        try:
            line = self._lines.get(timeout=timeout)
        except queue.Empty:
            line = ""
        ready = re.fullmatch(r"minisgl is ready: (http://\S+)\n", line)
        if ready is None:
            raise RuntimeError(f"the server said {line!r} instead of being ready; its log:\n{self.log()}")
        self.url = ready[1]
        self.ready_after = time.monotonic() - self.started
        self.look()

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- asking it -----------------------------------------------------------------------------------------

    def metrics(self) -> dict[str, float]:
        """The samples of ``/metrics``, by name with labels."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as answer:
            text = answer.read().decode()
        return {name + labels: float(value) for name, labels, value in _SAMPLE.findall(text)}

    def workers(self) -> dict[str, int]:
        """Process ids by role."""
        found = (re.fullmatch(r'minisgl_process\{pid="(\d+)",process="(.+)"\}', name) for name in self.metrics())
        return {match[2]: int(match[1]) for match in found if match is not None}

    def log(self) -> str:
        """What it wrote to standard error so far."""
        self._stderr.seek(0)
        return self._stderr.read()

    def idle_pool(self) -> bool:
        """Whether no request is open and every page is free or cached (promise 9)."""
        m = {name.removeprefix("minisgl_scheduler_"): value for name, value in self.metrics().items()}
        return (
            m["minisgl_open_requests"] == m["waiting"] == m["running"] == m["pages_retiring"] == 0
            and m["pages_free"] + m["pages_cached"] == m["pages"]
            and m["pages_evictable"] == m["pages_cached"]
        )

    # ---- ending it -----------------------------------------------------------------------------------------

    def look(self) -> None:
        """Remember its processes, sockets and shared memory, so that `left` can tell which of them are still there."""
        with contextlib.suppress(psutil.NoSuchProcess):
            launcher = psutil.Process(self.process.pid)
            self.family = [launcher, *launcher.children(recursive=True)]
        for process in self.family:
            with contextlib.suppress(psutil.Error, OSError):
                self.things |= {str(c.laddr) for c in process.net_connections("unix") if c.laddr}
                self.things |= {m.path for m in process.memory_maps() if m.path.startswith("/dev/shm/")}

    def left(self) -> list[str]:
        """What is still there of it: processes, sockets, shared memory, temporary files."""

        def alive(process: psutil.Process) -> bool:
            with contextlib.suppress(psutil.NoSuchProcess):
                return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
            return False

        sockets = Path("/proc/net/unix")
        bound = set(sockets.read_text().split()) if sockets.exists() else set()
        things = {thing for thing in self.things if thing in bound or os.path.exists(thing)}
        return [*map(str, filter(alive, self.family)), *sorted(things), *map(str, self.folder.iterdir())]

    def wait(self, timeout: float) -> int:
        """Its exit status. Raises subprocess.TimeoutExpired."""
        return self.process.wait(timeout)

    def close(self) -> None:
        """End it, by force if it does not go."""
        self.look()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(5)
        for process in self.family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()  # a process id that was given to another process since is not touched
        self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
        self._stderr.close()
