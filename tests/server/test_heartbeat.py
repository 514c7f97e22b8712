"""The launcher's watch over a scheduler: what counts as hung, and what never does."""

from __future__ import annotations

import asyncio
import multiprocessing
import time

import pytest

from minisgl.server.heartbeat import Heartbeat

SECONDS = 0.1


@pytest.fixture
def heartbeat() -> Heartbeat:
    return Heartbeat(multiprocessing.get_context("spawn"))


async def stops(heartbeat: Heartbeat, within: float) -> bool:
    try:
        await asyncio.wait_for(heartbeat.stopped(SECONDS), within)
    except TimeoutError:
        return False
    return True


def test_promise_10_a_beat_that_stays_the_last_one_is_a_hang(heartbeat: Heartbeat) -> None:
    heartbeat.beat()
    began = time.monotonic()
    assert asyncio.run(stops(heartbeat, 30))
    assert time.monotonic() - began >= SECONDS


def test_promise_10_neither_a_start_nor_a_rest_is_a_hang(heartbeat: Heartbeat) -> None:
    assert not asyncio.run(stops(heartbeat, 2 * SECONDS))
    heartbeat.beat()
    heartbeat.rest()
    assert not asyncio.run(stops(heartbeat, 2 * SECONDS))


def test_promise_10_short_turns_that_look_alike_are_no_hang(heartbeat: Heartbeat) -> None:
    """Whenever the watcher looks, the scheduler is in the first turn after a rest: always another one."""

    async def busy() -> bool:
        watch = asyncio.ensure_future(heartbeat.stopped(SECONDS))
        for _ in range(60):
            heartbeat.rest()
            heartbeat.beat()
            await asyncio.sleep(SECONDS / 20)
        return watch.cancel()  # False where it has returned

    assert asyncio.run(busy())


def test_promise_10_time_in_which_the_watcher_did_not_run_does_not_count(heartbeat: Heartbeat) -> None:
    """As after a laptop was asleep: the clock says hours, and the scheduler had none of them either."""

    async def suspended() -> bool:
        heartbeat.beat()
        watch = asyncio.ensure_future(heartbeat.stopped(SECONDS))
        await asyncio.sleep(SECONDS / 4)
        time.sleep(3 * SECONDS)
        await asyncio.sleep(SECONDS / 4)
        return watch.cancel()

    assert asyncio.run(suspended())
