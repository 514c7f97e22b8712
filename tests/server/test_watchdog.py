"""The watchdog: which workers count as hung, and which do not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from minisgl.plugins.http import watchdog
from minisgl.plugins.http.watchdog import Watchdog
from minisgl.server.errors import ApiError

SECONDS = 0.1


class Workers:
    """A dispatcher and a launcher with one worker, which answers pings while ``answers`` is true."""

    workers = ("scheduler-0",)

    def __init__(self, answers: bool):
        self.answers = answers
        self.open: asyncio.Future[None] | None = None
        self.killed: list[tuple[str, str]] = []
        self.dispatcher = self.launcher = self

    async def answer(self) -> None:
        self.open = asyncio.get_running_loop().create_future()
        if self.answers:
            self.open.set_result(None)
        await self.open


@pytest.fixture(autouse=True)
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Record which workers are killed: `Workers` has no processes, and answers itself."""
    monkeypatch.setattr(watchdog, "ask_worker", lambda workers, worker, function: workers.answer())
    monkeypatch.setattr(watchdog, "kill_hung", lambda workers, role, why: workers.killed.append((role, why)))


def watch(answers: bool, body: Callable[[Workers], Awaitable[None]], limit: float = SECONDS) -> tuple[Workers, float]:
    """Watch a worker while ``body`` runs. Return the worker, and the seconds that ``body`` took."""

    async def run() -> tuple[Workers, float]:
        workers: Any = Workers(answers)
        dog = Watchdog(limit)
        began = time.monotonic()
        dog.begin(workers)
        await body(workers)
        dog.close(0)
        return workers, time.monotonic() - began

    return asyncio.run(run())


async def until_killed(workers: Workers) -> None:
    async with asyncio.timeout(150):
        while not workers.killed:
            await asyncio.sleep(SECONDS / 10)


async def wait(workers: Workers) -> None:
    await asyncio.sleep(3 * SECONDS)


def test_promise_10_no_answer_is_a_hang() -> None:
    workers, seconds = watch(False, until_killed)
    ((role, why),) = workers.killed
    assert role == "scheduler-0"
    assert "it answered no ping for 0.1 s and was killed" in why and "server.watchdog=0.1" in why
    assert seconds >= SECONDS


def test_promise_10_answers_are_no_hang() -> None:
    assert watch(True, wait)[0].killed == []


def test_promise_10_late_answers_are_no_hang() -> None:
    """A worker whose steps are shorter than the limit answers between them."""

    async def slow_steps(workers: Workers) -> None:
        for _ in range(20):
            await asyncio.sleep(SECONDS / 4)
            assert workers.open is not None
            if not workers.open.done():
                workers.open.set_result(None)

    assert watch(False, slow_steps)[0].killed == []


def test_promise_10_suspended_time_does_not_count() -> None:
    """Time in which the watcher's event loop did not run, such as while a laptop is suspended, is not counted."""

    async def suspended(workers: Workers) -> None:
        await asyncio.sleep(SECONDS / 4)
        time.sleep(3 * SECONDS)
        await asyncio.sleep(SECONDS / 4)

    assert watch(False, suspended)[0].killed == []


def test_without_a_limit_no_worker_is_killed() -> None:
    assert watch(False, wait, limit=0)[0].killed == []


def test_a_silent_worker_is_unhealthy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "UNHEALTHY_SECONDS", 0.0)

    async def run() -> None:
        workers: Any = Workers(False)
        dog = Watchdog(4 * SECONDS)
        dog.begin(workers)
        dog.check_health()
        await asyncio.sleep(2 * SECONDS)
        with pytest.raises(ApiError, match=r"No answer for 0 s from: scheduler-0\."):
            dog.check_health()
        workers.answers = True
        workers.open.set_result(None)
        await asyncio.sleep(2 * SECONDS)
        dog.check_health()
        dog.close(0)

    asyncio.run(run())
