"""`run_cluster`: the router and the supervisor of one cluster, from the start to the end, and the signals.

SIGTERM and SIGHUP drain: the router accepts no new requests, the open ones may finish within ``server.drain_timeout``,
then all servers end. A second signal, or SIGINT, ends everything at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
from collections.abc import Sequence

from minisgl.cluster.options import ClusterConfig, Share, replica_words, shares
from minisgl.cluster.replica_process import ReplicaProcess
from minisgl.cluster.router import Router
from minisgl.cluster.status import ClusterStatus, ReplicaStatus
from minisgl.cluster.supervisor import ReplicaError, Supervisor
from minisgl.config import ConfigError
from minisgl.models.resolve import resolve_model
from minisgl.plugin_manager.manager import PluginManager
from minisgl.server.worker_pool import heeded_signals
from minisgl.tokenizer.tokenizer import build_tokenizer

log = logging.getLogger(__name__)

SERVER = (sys.executable, "-m", "minisgl.cluster.attached")


def run_cluster(config: ClusterConfig, manager: PluginManager, words: Sequence[str]) -> int:
    """Run the cluster until a signal ends it or no replica is left. Return the exit status of the program.

    ``words`` are the arguments of the command line. Raise `ConfigError` for a wrong option.
    """
    parts = shares(config)
    replicas = [ReplicaStatus(index, devices=part.text) for index, part in enumerate(parts)]
    status = ClusterStatus(replicas)
    router: Router = manager.build(
        "router",
        config.router,
        cluster=config,
        status=status,
        policy=manager.build("routing", config.routing),
        make_tokenizer=lambda: build_tokenizer(
            config.tokenizer, manager, resolve_model(config.model), config.parse_special_tokens
        ),
    )
    return asyncio.run(Cluster(config, words, parts, router, status).run())


class Cluster:
    """One run of a cluster."""

    def __init__(
        self, config: ClusterConfig, words: Sequence[str], parts: Sequence[Share], router: Router, status: ClusterStatus
    ):
        self._config, self._words, self._parts = config, words, parts
        self._router, self._status = router, status
        self._supervisor = Supervisor(self._start, router, status, config)
        self._signals: asyncio.Queue[int] = asyncio.Queue()

    async def _start(self, index: int) -> ReplicaProcess:
        words = [*replica_words(self._words, self._config, index), *self._router.options(index)]
        part = self._parts[index]
        return await ReplicaProcess.start(
            f"replica-{index}",
            [*SERVER, *words],
            part.environment(),
            part.cores if part.gpus is None else (),
            self._config.log_format == "json",
        )

    async def run(self) -> int:
        """Run the cluster. Return the exit status."""
        loop = asyncio.get_running_loop()
        for number in heeded_signals():
            loop.add_signal_handler(number, self._signals.put_nowait, number)
        tasks: list[asyncio.Task[None]] = []
        try:
            url = await self._router.start()
            running = asyncio.create_task(self._supervisor.run())
            ended = asyncio.create_task(self._end_with_router())
            announced = asyncio.create_task(self._announce(url))
            tasks = [running, ended, announced]
            return await self._wait(running, ended)
        except ReplicaError as error:
            if error.options:
                raise ConfigError(str(error).removeprefix("minisgl: ")) from None
            log.error("%s", error)
            return 1
        finally:
            await self._supervisor.end()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._router.close()

    async def _announce(self, url: str) -> None:
        await self._supervisor.wait_until_started()
        with contextlib.suppress(OSError, ValueError):
            print(f"minisgl is ready: {url}", flush=True)
            if self._router.status_url != url:
                print(f"cluster status: {self._router.status_url}", flush=True)
        log.info("ready: %s, %d replicas", url, self._status.num_ready)

    async def _end_with_router(self) -> None:
        raise ReplicaError(f"The router ended: {await self._router.wait_until_ended()}")

    async def _wait(self, *tasks: asyncio.Task[None]) -> int:
        """Wait until a signal arrives or a task fails. Return the exit status."""
        arrived = asyncio.create_task(self._signals.get())
        await asyncio.wait({arrived, *tasks}, return_when=asyncio.FIRST_COMPLETED)
        if not arrived.done():
            arrived.cancel()
            for task in tasks:
                if task.done():
                    task.result()
            return 1
        number = arrived.result()
        self._status.stopping = "The server is shutting down."
        if number != signal.SIGINT:
            number = await self._drain()
        return 128 + number if number == signal.SIGINT else 0

    async def _drain(self) -> int:
        """Let the open requests finish. Return SIGTERM, or the signal that ended the wait."""
        self._supervisor.stop()
        again = asyncio.create_task(self._signals.get())
        drained = asyncio.create_task(self._router.drain(self._config.server.drain_timeout))
        try:
            await asyncio.wait({again, drained}, return_when=asyncio.FIRST_COMPLETED)
            return again.result() if again.done() else signal.SIGTERM
        finally:
            again.cancel()
            drained.cancel()
            await asyncio.gather(again, drained, return_exceptions=True)
