"""The supervisor: starts the replicas, watches them, and starts a dead one again.

A replica is dead if its main process has ended, if it takes longer than ``start_timeout`` to start, or if it answers no
health check for ``health_timeout`` seconds. The router forgets a dead replica at once. The replica is started again
when its last process has exited: after 1 s, and after twice as long each further time in a row. A replica that died
``restart_limit`` times in a row is given up; `Supervisor.run` ends when none is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

from minisgl.cluster.replica_process import ReplicaProcess
from minisgl.cluster.router import Router, address_of
from minisgl.cluster.status import ClusterStatus
from minisgl.cluster.upstream import Upstream, UpstreamError

log = logging.getLogger(__name__)

BACKOFF_SECONDS = 1.0
"""Seconds before a dead replica is started again, the first time in a row."""
MAX_BACKOFF_SECONDS = 60.0
STABLE_SECONDS = 60.0
"""Seconds for which a replica must have been ready, so that its death does not count as one of several in a row."""
HEALTH_SECONDS = 1.0
"""Seconds between two health checks of a replica."""
UNHEALTHY_SECONDS = 5.0
"""Seconds without an answer to a health check after which a replica gets no new requests."""
END_SECONDS = 5.0
"""Seconds that a server has to end after it was told to end at once. Then its processes are killed."""
OPTIONS_STATUS = 2
"""The exit status of a server whose options are wrong."""


class ReplicaError(Exception):
    """The cluster can't go on without replicas. The message has the last lines of a replica's log.

    ``options`` is true if a replica refused its options at the first start.
    """

    def __init__(self, message: str, options: bool = False):
        super().__init__(message)
        self.options = options


class Limits(Protocol):
    """The options of the supervisor, as in `ClusterConfig`."""

    restart_limit: int
    start_timeout: float
    health_timeout: float


class Supervisor:
    """The replicas of one cluster.

    ``start(index)`` starts the server of a replica. It is called again after the replica's death.
    """

    def __init__(
        self,
        start: Callable[[int], Awaitable[ReplicaProcess]],
        router: Router,
        status: ClusterStatus,
        limits: Limits,
        backoff: float = BACKOFF_SECONDS,
    ):
        self._start, self._router, self._status, self._limits = start, router, status, limits
        self._backoff = backoff
        self._processes: dict[int, ReplicaProcess] = {}
        self._starting: set[asyncio.Future[ReplicaProcess]] = set()
        self._started = [asyncio.Event() for _ in status.replicas]
        self._stopping = False

    async def wait_until_started(self) -> None:
        """Wait until each replica is ready for the first time, or is given up."""
        for event in self._started:
            await event.wait()

    async def run(self) -> None:
        """Keep all replicas running. Raise `ReplicaError` if none is left. Return when they have ended after `stop`."""
        replicas = self._status.replicas
        tasks = [asyncio.create_task(self._keep(replica.replica)) for replica in replicas]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    # ---- one replica -----------------------------------------------------------------------------------------

    async def _keep(self, index: int) -> None:
        """Start replica ``index`` again and again, until it is given up or the cluster stops."""
        status = self._status.replicas[index]
        deaths = 0
        while not self._stopping:
            status.state = "starting"
            try:
                process = await self._start_process(index)
            except OSError as error:  # such as no memory for another process
                if not self._started[index].is_set():
                    raise ReplicaError(f"replica-{index} can't be started: {error}") from error
                status.state = "waiting"
                log.error("replica-%d can't be started: %s", index, error)
                await asyncio.sleep(MAX_BACKOFF_SECONDS)
                continue
            reason, ready_seconds = await self._run_process(index, process)
            status.state, status.url = "stopped" if self._stopping else "waiting", ""
            await self._forget(index)
            await process.kill()
            del self._processes[index]
            status.pid = 0
            if self._stopping:
                return
            log.error("%s is dead: it %s", process.name, reason)
            deaths = 0 if ready_seconds >= STABLE_SECONDS else deaths + 1
            if self._given_up(index, process, reason, deaths):
                return
            await asyncio.sleep(min(self._backoff * 2 ** min(max(deaths - 1, 0), 16), MAX_BACKOFF_SECONDS))
            status.restarts += 1

    async def _start_process(self, index: int) -> ReplicaProcess:
        start = asyncio.ensure_future(self._start(index))
        self._starting.add(start)
        start.add_done_callback(self._starting.discard)
        process = await asyncio.shield(start)
        self._processes[index] = process
        self._status.replicas[index].pid = process.pid
        return process

    def _given_up(self, index: int, process: ReplicaProcess, reason: str, deaths: int) -> bool:
        """Give replica ``index`` up if it has died too often. Return whether. Raise `ReplicaError` if none is left."""
        status = self._status.replicas[index]
        lines = "\n".join(process.log)
        if process.exit_status == OPTIONS_STATUS and not self._started[index].is_set():
            raise ReplicaError(process.log[-1] if process.log else f"{process.name} {reason}", options=True)
        if deaths < self._limits.restart_limit:
            return False
        status.state = "given up"
        self._started[index].set()
        log.error(
            "%s died %d times in a row and is not started again. Its last lines:\n%s", process.name, deaths, lines
        )
        if all(replica.state == "given up" for replica in self._status.replicas):
            raise ReplicaError(f"No replica is left. {process.name} {reason}. Its last lines:\n{lines}")
        return True

    async def _run_process(self, index: int, process: ReplicaProcess) -> tuple[str, float]:
        """Wait for the end of the replica. Return the reason, and the seconds for which it was ready."""
        status = self._status.replicas[index]
        ended = asyncio.create_task(process.wait())
        health: asyncio.Task[str] | None = None
        ready_at = None
        try:
            await asyncio.wait(
                {ended, process.ready}, timeout=self._limits.start_timeout, return_when=asyncio.FIRST_COMPLETED
            )
            if not process.ready.done() or process.ready.cancelled():
                if not ended.done() and not process.ready.done():
                    return f"did not start within {self._limits.start_timeout:g} s (start_timeout)", 0.0
                await asyncio.wait({ended}, timeout=END_SECONDS)
                return (ended.result() if ended.done() else "closed its standard output"), 0.0
            url = process.ready.result()
            status.start_seconds = round(time.monotonic() - process.started, 3)
            try:
                await self._router.add(index, url)
            except Exception as error:
                return f"could not be added to the router: {error}", 0.0
            status.state, status.url, ready_at = "ready", url, time.monotonic()
            log.info("%s is ready after %.1f s: %s", process.name, status.start_seconds, url)
            self._started[index].set()
            health = asyncio.create_task(self._watch_health(index, url))
            await asyncio.wait({ended, health}, return_when=asyncio.FIRST_COMPLETED)
            reason = ended.result() if ended.done() else health.result()
            return reason, time.monotonic() - ready_at
        finally:
            for task in (ended, health):
                if task is not None:
                    task.cancel()

    async def _forget(self, index: int) -> None:
        try:
            await self._router.remove(index)
        except Exception:
            log.exception("replica-%d can't be removed from the router", index)

    async def _watch_health(self, index: int, url: str) -> str:
        """Check the health of a replica until it counts as dead. Return the reason.

        Bad seconds are added up check by check, so that the time while this process is stopped does not count.
        """
        upstream = Upstream(*address_of(url))
        status = self._status.replicas[index]
        bad = 0.0
        try:
            while bad < self._limits.health_timeout:
                await asyncio.sleep(HEALTH_SECONDS)
                began = time.monotonic()
                if await is_healthy(upstream):
                    bad = 0.0
                else:
                    bad += min(time.monotonic() - began, UNHEALTHY_SECONDS) + HEALTH_SECONDS
                healthy = bad < min(UNHEALTHY_SECONDS, self._limits.health_timeout)
                if healthy != (status.state == "ready"):
                    log.warning("replica-%d is %s", index, "healthy again" if healthy else "unhealthy")
                    status.state = "ready" if healthy else "unhealthy"
                    self._router.set_healthy(index, healthy)
            return f"answered no health check for {self._limits.health_timeout:g} s (health_timeout)"
        finally:
            upstream.close()

    # ---- the end ---------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Start no replica again."""
        self._stopping = True

    async def end(self) -> None:
        """End all servers: at once, and by force if they take too long. Afterwards no process of theirs exists."""
        self.stop()
        await asyncio.gather(*self._starting, return_exceptions=True)
        processes = list(self._processes.values())
        for process in processes:
            process.interrupt()
        if processes:
            await asyncio.wait({asyncio.ensure_future(process.wait()) for process in processes}, timeout=END_SECONDS)
        await asyncio.gather(*(process.kill() for process in processes))


async def is_healthy(upstream: Upstream) -> bool:
    with contextlib.suppress(UpstreamError, TimeoutError):
        async with asyncio.timeout(UNHEALTHY_SECONDS):
            response = await upstream.request(b"GET", b"/health", [(b"host", b"replica")], b"")
            await response.body()
            response.close()
            return response.status == 200
    return False
