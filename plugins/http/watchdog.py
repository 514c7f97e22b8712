"""The watchdog asks every worker process once a second, and kills a worker that does not answer (promise 10).

A worker's main loop answers, between two steps or two messages. If another thread of the worker answered,
the watchdog would not notice that the main loop hangs. Time is counted in sleeps of the event loop, not read off a
clock. So the time while the machine is suspended, or while this process itself gets no CPU time, does not count.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from typing import TYPE_CHECKING

from minisgl import hookimpl
from minisgl.config import Config
from minisgl.plugins.http.apis.queries import ask_worker, own_counts
from minisgl.server.app import Api
from minisgl.server.dispatch import Dispatcher
from minisgl.server.errors import ApiError
from minisgl.server.extension import HttpExtension
from minisgl.server.worker_pool import STACK_DUMP_SIGNAL, Failed

if TYPE_CHECKING:
    from minisgl.server.launcher import Launcher

log = logging.getLogger(__name__)

PING_SECONDS = 1.0
"""Seconds between the answer of a worker and its next question, the ping."""
UNHEALTHY_SECONDS = 20.0
"""Seconds that a worker may leave a ping without an answer, as in a long step, before ``/health`` answers 503."""


@hookimpl
def minisgl_http(config: Config) -> HttpExtension:
    return Watchdog(config.server.watchdog)


class Watchdog(HttpExtension):
    """Kills a worker that leaves a ping without an answer for ``limit`` seconds. With 0, it kills none."""

    options = ("watchdog",)

    def __init__(self, limit: float):
        self._limit = limit
        self._silent: dict[str, float] = {}  # name of a worker -> seconds for which its ping has had no answer
        self._tasks: list[asyncio.Task[None]] = []

    def begin(self, api: Api) -> None:
        self._tasks = [asyncio.create_task(self._watch(api, worker)) for worker in api.dispatcher.workers]

    def close(self, timeout: float) -> None:
        for task in self._tasks:
            task.cancel()

    def check_health(self) -> None:
        silent = [worker for worker, seconds in self._silent.items() if seconds > UNHEALTHY_SECONDS]
        if silent:
            raise ApiError(503, f"No answer for {UNHEALTHY_SECONDS:g} s from: {', '.join(silent)}.")

    async def _watch(self, api: Api, worker: str) -> None:
        interval = min(PING_SECONDS, self._limit / 4) if self._limit else PING_SECONDS
        answer = asyncio.ensure_future(_ping(api.dispatcher, worker))
        while not self._limit or self._silent.get(worker, 0.0) < self._limit:
            if answer.done():
                answer = asyncio.ensure_future(_ping(api.dispatcher, worker))
            await asyncio.sleep(interval)
            self._silent[worker] = 0.0 if answer.done() else self._silent.get(worker, 0.0) + interval
        if api.launcher is not None:
            unit = "step" if worker.startswith("scheduler") else "message"
            kill_hung(
                api.launcher,
                worker,
                f"it answered no ping for {self._limit:g} s and was killed: it was stopped, or stuck in one {unit} "
                f"(server.watchdog={self._limit:g}: if a {unit} may take longer, set a larger number of seconds; 0 "
                "switches the watchdog off)",
            )


async def _ping(dispatcher: Dispatcher, worker: str) -> None:
    """Return when a worker has answered, or when the server ends."""
    with contextlib.suppress(ApiError):
        await ask_worker(dispatcher, worker, own_counts)


def kill_hung(launcher: Launcher, role: str, why: str) -> None:
    """Log the stack of the worker ``role``, which hangs, kill it, and set ``why`` as its failure: the server then ends.

    If a rank hangs, log the stacks of all ranks: it may be waiting for another rank that hangs.
    """
    for worker in launcher.worker_pool.workers:
        is_asked = worker.role == role or all(name.startswith("scheduler") for name in (role, worker.role))
        if is_asked and not worker.has_ended:
            assert worker.process.pid is not None
            log.error("stack of %s:", worker.role)
            os.kill(worker.process.pid, STACK_DUMP_SIGNAL)
            time.sleep(0.1)  # let this worker write its stack before the next worker writes
    for worker in launcher.worker_pool.workers:
        if worker.role == role:
            worker.process.kill()
            worker.failed, worker.hung = Failed(why), True
    launcher.look_at_workers()
