"""The watchdog: it pings every worker process once a second, and kills one that does not answer (promise 10).

A worker answers between two steps or two messages, in its main loop: a thread of its own would go on answering while
the loop hangs. Time is counted in sleeps of the event loop, not read off a clock. So the time while the machine is
suspended, or while this process itself gets no CPU time, does not count.
"""

from __future__ import annotations

import asyncio

from minisgl import hookimpl
from minisgl.config import Config
from minisgl.server.app import Api
from minisgl.server.errors import ApiError
from minisgl.server.extension import HttpExtension

PING_SECONDS = 1.0
"""Seconds between the answer of a worker and its next ping."""
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
        while not self._limit or self._silent.get(worker, 0.0) < self._limit:
            answer = api.dispatcher.ping(worker)
            await asyncio.sleep(interval)
            self._silent[worker] = 0.0 if answer.done() else self._silent.get(worker, 0.0) + interval
        if api.launcher is not None:
            unit = "step" if worker.startswith("scheduler") else "message"
            api.launcher.kill_hung(
                worker,
                f"it answered no ping for {self._limit:g} s and was killed: it was stopped, or stuck in one {unit} "
                f"(server.watchdog={self._limit:g}: if a {unit} may take longer, set a larger number of seconds; 0 "
                "switches the watchdog off)",
            )
