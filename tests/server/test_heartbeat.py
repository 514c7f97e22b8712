"""The heartbeat: which sequences of beats count as a hang, and which do not."""

from __future__ import annotations

import asyncio
import multiprocessing
import time

import pytest

from minisgl.server.worker_process import Heartbeat

SECONDS = 0.1


@pytest.fixture
def heartbeat() -> Heartbeat:
    return Heartbeat(multiprocessing.get_context("spawn"))


async def hangs(heartbeat: Heartbeat, within: float) -> bool:
    """Return whether the heartbeat reports a hang within that number of seconds."""
    try:
        await asyncio.wait_for(heartbeat.wait_until_hung(SECONDS), within)
    except TimeoutError:
        return False
    return True


def test_promise_10_no_further_beat_is_a_hang(heartbeat: Heartbeat) -> None:
    heartbeat.beat()
    began = time.monotonic()
    assert asyncio.run(hangs(heartbeat, 30))
    assert time.monotonic() - began >= SECONDS


def test_promise_10_start_and_idle_are_no_hang(heartbeat: Heartbeat) -> None:
    assert not asyncio.run(hangs(heartbeat, 2 * SECONDS))
    heartbeat.beat()
    heartbeat.idle()
    assert not asyncio.run(hangs(heartbeat, 2 * SECONDS))


def test_promise_10_short_steps_are_no_hang(heartbeat: Heartbeat) -> None:
    """A scheduler that is in its first step after an idle phase, each time the watcher looks, is not hung."""

    async def busy() -> bool:
        watch = asyncio.ensure_future(heartbeat.wait_until_hung(SECONDS))
        for _ in range(60):
            heartbeat.idle()
            heartbeat.beat()
            await asyncio.sleep(SECONDS / 20)
        return watch.cancel()  # False if the watch has already returned

    assert asyncio.run(busy())


def test_promise_10_suspended_time_does_not_count(heartbeat: Heartbeat) -> None:
    """Time in which the watcher's event loop did not run, such as while a laptop is suspended, is not counted."""

    async def suspended() -> bool:
        heartbeat.beat()
        watch = asyncio.ensure_future(heartbeat.wait_until_hung(SECONDS))
        await asyncio.sleep(SECONDS / 4)
        time.sleep(3 * SECONDS)
        await asyncio.sleep(SECONDS / 4)
        return watch.cancel()

    assert asyncio.run(suspended())
