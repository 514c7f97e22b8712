"""Starts ``python -m minisgl`` for tests, as a user does: a real launcher with its processes and sockets.

This module uses the server's command line, its output and psutil. It imports no code of the server.
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
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

import psutil

__all__ = ["Server", "patient_timeout", "scaled_timeout"]

_SAMPLE = re.compile(r"^(\w+)(\{.*\})? (\S+)$", re.MULTILINE)


def scaled_timeout(seconds: float) -> float:
    """Return ``seconds``, multiplied by the load per core if the machine is overloaded.

    The load is an average of the last minute, which follows late, and says nothing of a slow machine. So when tests run
    in several processes, the limits are at least twice as long.
    """
    load = os.getloadavg()[0] / (os.cpu_count() or 1)
    return seconds * max(2.0 if "PYTEST_XDIST_WORKER" in os.environ else 1.0, load)


def patient_timeout(seconds: float) -> float:
    """Return the limit of a wait that only a fault reaches, and that takes less than ``seconds`` alone.

    A limit that is never reached costs nothing, and the load may rise after it is computed. So when tests run in
    several processes, the limit is ten times as long. Where code is expected to reach its limit, use `scaled_timeout`.
    """
    return max(scaled_timeout(seconds), 10 * seconds if "PYTEST_XDIST_WORKER" in os.environ else seconds)


class Server:
    """A server process on a free port, to use as a context manager.

    - ``options``: options as on the command line, for example ``"model=tutor"``.
    - ``wait``: wait until the server is ready. If it is not ready within ``timeout`` seconds, raise RuntimeError.
    - ``env``: environment variables of the server, in addition to this process's.
    - ``attached``: the server also ends when this process ends, even if this process is killed.
    - ``python``: the words that start the Python interpreter; None: this process's.
    """

    def __init__(
        self,
        *options: str,
        wait: bool = True,
        timeout: float = 240.0,
        env: Mapping[str, str] | None = None,
        attached: bool = False,
        python: Sequence[str] | None = None,
    ):
        self.folder = Path(tempfile.mkdtemp(prefix="minisgl-test-"))  # the server's folder for temporary files
        self._stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed in close()
        module = "minisgl.cluster.attached" if attached else "minisgl"
        command = [*(python or [sys.executable]), "-m", module, "device=cpu", "server.port=0", *options]
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            # A shell starts background processes with SIGINT ignored, and the server would inherit this. Restore the
            # handler, so that the tests can stop the server with SIGINT.
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
        self.processes: list[psutil.Process] = []  # the server's processes at the last `record_resources`
        self.resources: set[str] = set()  # sockets and shared memory that the processes had at any `record_resources`
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

    def wait_until_ready(self, timeout: float = 240.0) -> None:
        """Wait until the server prints that it is ready.

        Raise RuntimeError after ``timeout`` seconds, or if the server exits first. A plugin may print other lines.
        """
        ready, until, line = None, time.monotonic() + timeout, ""
        while ready is None:
            try:
                line = self._lines.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                line = ""
            if not line:
                raise RuntimeError(
                    f"expected the server to print 'minisgl is ready: …' within {timeout:.0f} s. Its log:\n{self.log()}"
                )
            ready = re.search(r"minisgl is ready: (https?://\S+)\n", line)
        self.url = ready[1]
        self.ready_after = time.monotonic() - self.started
        self.record_resources()

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- state ---------------------------------------------------------------------------------------------

    def metrics(self) -> dict[str, float]:
        """Return the samples of ``/metrics``: name with labels → value."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=60) as response:
            text = response.read().decode()
        return {name + labels: float(value) for name, labels, value in _SAMPLE.findall(text)}

    def workers(self) -> dict[str, int]:
        """Return the process id of each worker by the worker's name, from ``/metrics``."""
        found = (re.fullmatch(r'minisgl_process\{pid="(\d+)",process="(.+)"\}', name) for name in self.metrics())
        return {match[2]: int(match[1]) for match in found if match is not None}

    def log(self) -> str:
        """Return the server's output on standard error so far."""
        self._stderr.seek(0)
        return self._stderr.read()

    def idle_pool(self) -> bool:
        """Return whether no request is open and every page is free or evictable (promise 9)."""
        m = {name.removeprefix("minisgl_scheduler_"): value for name, value in self.metrics().items()}
        return (
            m["minisgl_open_requests"] == m["num_waiting_reqs"] == m["num_running_reqs"] == m["num_retiring_pages"] == 0
            and m["num_free_pages"] + m["num_cached_pages"] == m["num_pages"]
            and m["num_evictable_pages"] == m["num_cached_pages"]
        )

    def wait_until_idle(self, seconds: float = 10.0) -> bool:
        """Return whether `idle_pool` becomes true within ``seconds``, or ten times as many beside other tests.

        The last step of a request may end after the client has its answer.
        """
        until = time.monotonic() + patient_timeout(seconds)
        while not (idle := self.idle_pool()) and time.monotonic() < until:
            time.sleep(0.02)
        return idle

    # ---- end -----------------------------------------------------------------------------------------------

    def record_resources(self) -> None:
        """Record the server's processes, Unix sockets and shared memory, for a later call of `leftovers`."""
        with contextlib.suppress(psutil.NoSuchProcess):
            launcher = psutil.Process(self.process.pid)
            self.processes = [launcher, *launcher.children(recursive=True)]
        for process in self.processes:
            with contextlib.suppress(psutil.Error, OSError):
                self.resources |= {str(c.laddr) for c in process.net_connections("unix") if c.laddr}
                self.resources |= {m.path for m in process.memory_maps() if m.path.startswith("/dev/shm/")}

    def leftovers(self) -> list[str]:
        """Return the recorded processes, sockets and shared memory that still exist, and all temporary files."""

        def alive(process: psutil.Process) -> bool:
            with contextlib.suppress(psutil.NoSuchProcess):
                return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
            return False

        sockets = Path("/proc/net/unix")
        bound = set(sockets.read_text().split()) if sockets.exists() else set()
        resources = {name for name in self.resources if name in bound or os.path.exists(name)}
        return [*map(str, filter(alive, self.processes)), *sorted(resources), *map(str, self.folder.iterdir())]

    def wait(self, timeout: float) -> int:
        """Wait for the server to exit and return its exit status.

        Raise subprocess.TimeoutExpired after ``timeout`` seconds.
        """
        return self.process.wait(timeout)

    def close(self) -> None:
        """Stop the server with SIGINT, and delete the temporary files.

        Kill the server's processes that remain when the launcher has exited, or after 5 s."""
        self.record_resources()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(5)
        for process in self.processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()  # psutil does not kill a new process that reuses the process id
        self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
        self._stderr.close()
