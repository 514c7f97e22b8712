"""Fixtures of the cluster tests: replicas that are tiny servers on sockets; all processes are gone at the end."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

FAKE = Path(__file__).parent / "fake_server.py"


@pytest.fixture
def run() -> Callable[[Awaitable[None]], None]:
    """Return a function that runs a coroutine, for at most a minute."""

    def run(body: Awaitable[None]) -> None:
        async def limited() -> None:
            async with asyncio.timeout(60):
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
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.fixture(name="until")
def until_fixture() -> Callable[..., Awaitable[None]]:
    """Return `until`."""
    return until
