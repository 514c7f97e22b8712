"""The launcher's event loop: it runs the HTTP server, watches the worker processes, and handles the signals.

The launcher keeps promise 10: it notices a dead worker at once, ends every open request with an error, answers
``/health`` with 503 for `UNHEALTHY_GRACE_SECONDS`, and then ends every process of the server. SIGTERM and SIGHUP let
the open requests finish first, within ``server.drain_timeout``; SIGINT ends the server at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import uvicorn

from minisgl.config import Config, ConfigError
from minisgl.message.queue import Addresses
from minisgl.plugin_manager.manager import PluginManager
from minisgl.server.app import Api, create_app
from minisgl.server.dispatch import Dispatcher
from minisgl.server.extension import check_options, load_extensions
from minisgl.server.worker_pool import Worker, WorkerPool, heeded_signals

log = logging.getLogger(__name__)

LISTEN = 2048
"""The largest number of connections that wait until the server accepts them."""
UNHEALTHY_GRACE_SECONDS = 1.0
"""Seconds after the death of a worker in which ``/health`` answers 503, before the server exits."""
SHUTDOWN_GRACE_SECONDS = 1.0
"""Seconds that connections have to end by themselves, before they are closed."""
WORKER_GRACE_SECONDS = 2.5
"""Seconds that worker processes have to end by themselves, with their plugins, before they are killed."""
FLUSH_SECONDS = 5.0
"""Seconds that the last bytes of finished responses have to reach their clients after SIGTERM."""
_LOOK = 0
"""The event that a worker has sent a report or ended, or that the HTTP server has. Other events are signals."""


class _Http(uvicorn.Server):
    """A uvicorn server without uvicorn's signal handlers: the launcher handles the signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Launcher:
    """One run of the server, from the start of the workers to the end of the last worker."""

    def __init__(
        self,
        config: Config,
        manager: PluginManager,
        addresses: Addresses,
        worker_pool: WorkerPool,
        listener: socket.socket,
        sampling_defaults: Mapping[str, Any],
    ):
        self._config, self.plugin_manager, self._addresses = config, manager, addresses
        self.worker_pool, self._listener, self._sampling_defaults = worker_pool, listener, sampling_defaults
        self._events: asyncio.Queue[int] = asyncio.Queue()  # the numbers of signals, and `_LOOK`
        self._extensions = load_extensions(config, manager)
        check_options(config.server, self._extensions)

    async def run(self, pending: Sequence[int] = ()) -> int:
        """Run the server until it ends. Return the exit status of the program.

        ``pending`` are the numbers of the signals that have arrived before.
        """
        loop = asyncio.get_running_loop()
        for number in heeded_signals():
            loop.add_signal_handler(number, self._events.put_nowait, int(number))
        for arrived in pending:
            self._events.put_nowait(arrived)
        for worker in self.worker_pool.workers:
            for descriptor in (worker.pipe.fileno(), worker.process.sentinel):
                loop.add_reader(descriptor, self._on_worker_event, worker, descriptor)
        self._dispatcher = Dispatcher(self._addresses, self._config.server.max_queued)
        self._serve_http()
        try:
            status = await self._wait_until_ready()
            if status is None:
                self._begin_serving()
                status = await self._wait_until_end()
            return status
        finally:
            self._http.should_exit = True
            await asyncio.wait(
                {self._http_task}, timeout=SHUTDOWN_GRACE_SECONDS + (self._http.config.timeout_graceful_shutdown or 0)
            )
            self._dispatcher.close()
            for extension in self._extensions:
                extension.close(SHUTDOWN_GRACE_SECONDS)

    def _on_worker_event(self, worker: Worker, descriptor: int) -> None:
        """Read the reports of a worker whose pipe or sentinel became readable, and wake the launcher."""
        worker.read_reports()
        if descriptor == worker.process.sentinel or worker.pipe_closed:
            asyncio.get_running_loop().remove_reader(descriptor)
        self._events.put_nowait(_LOOK)

    def _serve_http(self) -> None:
        self._api = Api(self._config, self._dispatcher, self._extensions, self._sampling_defaults, self)
        options: dict[str, Any] = {
            "log_config": None,  # uvicorn's loggers use the handler of setup_logging
            "access_log": False,  # minisgl.plugins.http.access_log writes another one
            "lifespan": "off",
            "ws": "none",
            "timeout_graceful_shutdown": int(SHUTDOWN_GRACE_SECONDS),
            "timeout_keep_alive": 60,
        }
        for extension in self._extensions:
            options |= extension.uvicorn_options()
        self._http = _Http(uvicorn.Config(create_app(self._api), **options))
        self._http_task = asyncio.create_task(self._http.serve(sockets=[self._listener]))
        self._http_task.add_done_callback(lambda _: self._events.put_nowait(_LOOK))

    # ---- start, serve, end ---------------------------------------------------------------------------------

    async def _wait_until_ready(self) -> int | None:
        """Wait until every worker and the HTTP server are ready. Return None, or an exit status if the start failed.

        Raise `ConfigError` if a worker reports a wrong option.
        """
        while not all(worker.ready for worker in self.worker_pool.workers) or not self._http.started:
            if number := await self._events.get():
                return _status_of(number)
            if dead := self.worker_pool.dead():
                failed = dead[0].failed
                if failed is not None and failed.options:
                    raise ConfigError(failed.message)
                log.error("%s could not start: %s", dead[0].role, dead[0].exit_reason)
                return 1
        return None

    def _begin_serving(self) -> None:
        """Let requests in, and print the server's URL."""
        leader = self.worker_pool.workers[0].ready
        assert leader is not None
        assert leader.spec is not None
        self._dispatcher.begin(leader.spec)
        self._listener.listen(LISTEN)  # `minisgl.plugins.http.connections` lets uvicorn set a smaller number
        for extension in self._extensions:
            extension.begin(self._api)
        host, port = self._listener.getsockname()[:2]
        scheme = "https" if self._http.config.is_ssl else "http"
        url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
        printed = _print(f"minisgl is ready: {url}")
        if not printed or self._config.log_format == "json":  # a program that reads the log may not read the line above
            log.info("ready: %s", url)

    async def _wait_until_end(self) -> int:
        """Serve until a signal arrives, or a worker or the HTTP server ends. Return the exit status."""
        while True:
            if any(worker.asks_to_drain for worker in self.worker_pool.workers):
                return await self._drain(on_request=True)
            if number := await self._events.get():
                return await (self._end_now(number) if number == signal.SIGINT else self._drain())
            if status := await self._stop_if_worker_died():
                return status

    def look_at_workers(self) -> None:
        """Notice that a worker counts as ended, because an extension has killed it."""
        self._events.put_nowait(_LOOK)

    async def _drain(self, on_request: bool = False) -> int:
        """Refuse new requests, wait until the open requests have finished, and end the server: after SIGTERM or SIGHUP.

        The wait is at most ``server.drain_timeout`` seconds. ``on_request``: another rank asked for it, because its
        process got SIGTERM, so that a first SIGTERM for this process changes nothing. Return the exit status.
        """
        dispatcher = self._dispatcher
        dispatcher.state, dispatcher.reason = "draining", "The server is shutting down."
        idle = asyncio.ensure_future(dispatcher.wait_until_idle(self._config.server.drain_timeout))
        while not idle.done():
            event = asyncio.ensure_future(self._events.get())
            await asyncio.wait({idle, event}, return_when=asyncio.FIRST_COMPLETED)
            if not event.done():
                event.cancel()
            elif number := event.result():
                if number == signal.SIGHUP:
                    continue  # a terminal that is closed may send it twice, and a manager after SIGTERM
                if on_request and number == signal.SIGTERM:
                    on_request = False
                    continue
                idle.cancel()
                return await self._end_now(number)
            elif status := await self._stop_if_worker_died():
                idle.cancel()
                return status
        if not idle.result():
            dispatcher.fail("The server is shutting down, and the request took too long to finish.", 503)
        self._http.config.timeout_graceful_shutdown = int(FLUSH_SECONDS)
        return await self._end()

    async def _end_now(self, number: int) -> int:
        """End every open request with an error and end the server: after SIGINT, or SIGTERM while draining.

        ``number`` is the signal's number. Return the exit status.
        """
        self._dispatcher.state, self._dispatcher.reason = "dead", "The server is shutting down."
        self._dispatcher.fail(self._dispatcher.reason, 503)
        await self._end()
        return _status_of(number)

    async def _end(self) -> int:
        """Ask every worker to exit, and wait for them a short time. `serve` kills the workers that have not exited.

        Return 1 if a worker has failed meanwhile, such as in the hook `minisgl_closed`, and otherwise 0.
        """
        self._dispatcher.stop()
        await asyncio.to_thread(self.worker_pool.join, WORKER_GRACE_SECONDS)
        failed = [worker for worker in self.worker_pool.dead() if worker.failed is not None]
        for worker in failed:
            log.error("%s failed at its end: %s", worker.role, worker.exit_reason)
        return 1 if failed else 0

    async def _stop_if_worker_died(self) -> int:
        """End the server if a worker or the HTTP server has died, and return 1. Otherwise return 0.

        Every open request fails with the reason. ``/health`` answers 503 for `UNHEALTHY_GRACE_SECONDS`.
        """
        dead = self.worker_pool.dead()
        if not dead and not self._http_task.done():
            return 0
        cause = f"{dead[0].role} died: {dead[0].exit_reason}" if dead else "the HTTP server ended"
        self._dispatcher.state, self._dispatcher.reason = "dead", f"The server can't go on: {cause}"
        self._dispatcher.fail(self._dispatcher.reason, 503)
        log.error("%s", cause)
        await asyncio.gather(asyncio.to_thread(self.worker_pool.kill), asyncio.sleep(UNHEALTHY_GRACE_SECONDS))
        return 1


def _status_of(number: int) -> int:
    """Return the exit status for a signal: 128 + SIGINT as a shell reports it, and 0 for SIGTERM and SIGHUP."""
    return 128 + number if number == signal.SIGINT else 0


def _print(line: str) -> bool:
    """Print a line, and return whether it was printed.

    If standard output is closed or its disk is full, log that, and print to nowhere from then on.
    """
    try:
        print(line, flush=True)
    except (OSError, ValueError) as error:
        log.warning("can't print to standard output: %s", error)
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - the interpreter flushes and closes it at the exit
        return False
    return sys.stdout is not None  # None: it was closed when Python started
