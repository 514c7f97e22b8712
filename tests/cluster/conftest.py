"""Fixtures of the cluster tests: replicas that are tiny servers on sockets; all processes are gone at the end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from minisgl.testing.serving import patient_timeout

FAKE = Path(__file__).parent / "fake_server.py"


@pytest.fixture
def run() -> Callable[[Awaitable[None]], None]:
    """Return a function that runs a coroutine, for at most a minute."""

    def run(body: Awaitable[None]) -> None:
        async def limited() -> None:
            async with asyncio.timeout(300):
                await body

        asyncio.run(limited())

    return run


@pytest.fixture
def fake_command() -> list[str]:
    """Return the command of a server that computes nothing."""
    return [sys.executable, "-S", str(FAKE)]


@pytest.fixture
def leftovers() -> Iterator[Callable[[], list[str]]]:
    """Return a function that returns the processes that this test has started and that still run."""
    mark = f"MINISGL_TEST_MARK={os.getpid()}-{id(object())}"
    name, _, value = mark.partition("=")
    os.environ[name] = value

    def find() -> list[str]:
        found = []
        for process in psutil.process_iter():
            try:
                mine = process.environ().get(name) == value and process.pid != os.getpid()
                if mine and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(f"{process.pid} {' '.join(process.cmdline())}")
            except (psutil.Error, OSError):
                continue
        return found

    yield find
    del os.environ[name]
    for line in find():
        psutil.Process(int(line.split()[0])).kill()


async def until(condition: Callable[[], Any], seconds: float = 30.0) -> None:
    """Wait until ``condition()`` is true. Raise TimeoutError after ``seconds``."""
    async with asyncio.timeout(patient_timeout(seconds)):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.fixture(name="until")
def until_fixture() -> Callable[..., Awaitable[None]]:
    """Return `until`."""
    return until


class ClusterProcess:
    """``python -m minisgl.cluster`` with these options, as a user starts it. ``module`` is another program's file."""

    def __init__(self, *words: str, module: str = "", script: str = "{}"):
        program = [module] if module else ["-m", "minisgl.cluster"]
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed in close()
        self.process = subprocess.Popen(
            [sys.executable, *program, "device=cpu", "server.port=0", *words],
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            start_new_session=True,
            env={**os.environ, "FAKE_SCRIPT": script},
        )
        self.url = self.status_url = ""

    def wait_until_ready(self) -> None:
        """Wait until the cluster prints its URLs."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line.startswith("minisgl is ready: "):
            raise RuntimeError(f"it printed {line!r}:\n{self.log()}")
        self.url = self.status_url = line.split()[-1]

    def read_status_url(self) -> None:
        """Read the second line, of a router that answers the status elsewhere."""
        assert self.process.stdout is not None
        self.status_url = self.process.stdout.readline().split()[-1]

    def replicas(self) -> list[dict[str, Any]]:
        return httpx.get(f"{self.status_url}/replicas", timeout=30).json()["replicas"]

    def wait_for_states(self, *states: str, seconds: float = 120.0) -> list[dict[str, Any]]:
        """Wait until the replicas have these states. Return their entries of ``/replicas``."""
        deadline = time.monotonic() + patient_timeout(seconds)
        while True:
            found = self.replicas()
            if [each["state"] for each in found] == list(states):
                return found
            if time.monotonic() > deadline:
                raise TimeoutError(f"{found}\n{self.log()}")
            time.sleep(0.02)

    def log(self) -> str:
        self._log.seek(0)
        return self._log.read()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(20)
        self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()
        self._log.close()


@pytest.fixture
def start_cluster(leftovers: Callable[[], list[str]]) -> Iterator[Callable[..., ClusterProcess]]:
    """Return a function that starts a cluster. With ``fake``, its servers compute nothing, and ``script`` is theirs."""
    started = []

    def start(*words: str, fake: bool = False, **script: object) -> ClusterProcess:
        module = str(FAKE.with_name("fake_cluster.py")) if fake else ""
        started.append(ClusterProcess(*words, module=module, script=json.dumps(script)))
        return started[-1]

    yield start
    for cluster in started:
        cluster.close()
    until = time.monotonic() + patient_timeout(10)
    while left := leftovers():  # helpers of processes that have ended see that a moment later
        assert time.monotonic() < until, left
        time.sleep(0.02)
