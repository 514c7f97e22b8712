"""The launcher's event loop: HTTP, the watch over the other processes, and the signals that end it all.

What it promises (promise 10): a dead worker is noticed at once, open requests get an error, ``/health`` says 503 for a
second, and then nothing of the server is left. SIGTERM drains, SIGINT ends at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Iterator
from typing import Literal, NamedTuple

import uvicorn

from minisgl.config import Config, ConfigError
from minisgl.message import Addresses
from minisgl.plugin_manager.manager import PluginManager
from minisgl.server.app import Settings, create_app
from minisgl.server.dispatch import Dispatcher
from minisgl.server.metrics import Metrics
from minisgl.server.worker_pool import SIGNALS, Worker, WorkerPool

UNHEALTHY_GRACE_SECONDS = 1.0
"""Seconds that ``/health`` still answers after a worker died."""
GRACE = 1.0
"""Seconds that processes and connections have to end by themselves."""
FLUSH = 5.0
"""Seconds that the last bytes of finished answers have to reach their clients, when there is no hurry."""


class _Event(NamedTuple):
    """Something that the launcher has to act on."""

    kind: Literal["news", "signal", "http"]
    worker: Worker | None = None
    signal: int = 0


class _Http(uvicorn.Server):
    """uvicorn without its own signal handlers: the launcher has them."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Launcher:
    """One run of the server, from the first process to the last."""

    def __init__(
        self,
        config: Config,
        manager: PluginManager,
        addresses: Addresses,
        crew: WorkerPool,
        listener: socket.socket,
    ):
        self._config, self._plugin_manager, self._addresses = config, manager, addresses
        self._crew, self._listener = crew, listener
        self._events: asyncio.Queue[_Event] = asyncio.Queue()

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._events.put_nowait, _Event("signal", signal=number))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        for worker in self._crew.workers:
            for descriptor in (worker.pipe.fileno(), worker.process.sentinel):
                loop.add_reader(descriptor, self._on_news, worker, descriptor)
        self._dispatcher = Dispatcher(self._addresses, self._config.server.max_queued)
        self._metrics = Metrics(self._calls)
        self._serve_http()
        try:
            status = await self._starting()
            if status is None:
                self._announce()
                watch = asyncio.create_task(self._watch(self._config.server.watchdog))
                status = await self._serving()
                watch.cancel()
            return status
        finally:
            self._http.should_exit = True
            await asyncio.wait({self._http_task}, timeout=GRACE + (self._http.config.timeout_graceful_shutdown or 0))
            self._dispatcher.close()

    def _on_news(self, worker: Worker, descriptor: int) -> None:
        worker.listen()
        if descriptor == worker.process.sentinel or worker.hung_up:
            asyncio.get_running_loop().remove_reader(descriptor)
        self._events.put_nowait(_Event("news", worker))

    def _calls(self) -> Iterator[tuple[str, str, str, str, str, int]]:
        """How often each process has called plugins that are not built in."""
        yield from (("api", *call) for call in self._plugin_manager.called())
        for worker in self._crew.workers:
            if worker.called is not None:
                yield from ((worker.role, *call) for call in worker.called.calls)

    def _serve_http(self) -> None:
        server = self._config.server
        settings = Settings(server.served_model_name or self._config.model, server.api_key)
        app = create_app(self._dispatcher, settings, self._metrics)
        self._http = _Http(
            uvicorn.Config(
                app,
                log_level=server.log_level,
                lifespan="off",
                timeout_graceful_shutdown=int(GRACE),
                timeout_keep_alive=60,
            )
        )
        self._http_task = asyncio.create_task(self._http.serve(sockets=[self._listener]))
        self._http_task.add_done_callback(lambda _: self._events.put_nowait(_Event("http")))

    # ---- the three parts of its life -----------------------------------------------------------------------

    async def _starting(self) -> int | None:
        """Wait until every process is ready. An exit status where that does not come."""
        while not all(worker.ready for worker in self._crew.workers) or not self._http.started:
            event = await self._events.get()
            if event.kind == "signal":
                return _status_of(event.signal)
            if dead := self._crew.dead():
                failed = dead[0].failed
                if failed is not None and failed.options:
                    raise ConfigError(failed.message)
                print(f"minisgl: {dead[0].role} could not start: {dead[0].exit_reason}", file=sys.stderr, flush=True)
                return 1
        return None

    def _announce(self) -> None:
        leader = self._crew.workers[0].ready
        assert leader is not None
        assert leader.spec is not None
        plugins = [(plugin.name, str(plugin.path), plugin.sha256) for plugin in self._plugin_manager.plugins]
        self._metrics.process("api", os.getpid(), plugins)
        for worker in self._crew.workers:
            assert worker.ready is not None
            assert worker.process.pid is not None
            self._metrics.process(worker.role, worker.process.pid, worker.ready.plugins)
        self._dispatcher.begin(leader.spec)
        host, port = self._listener.getsockname()[:2]
        print(f"minisgl is ready: http://{f'[{host}]' if ':' in host else host}:{port}", flush=True)

    async def _serving(self) -> int:
        """Until a signal ends it, or a death."""
        while True:
            event = await self._events.get()
            if event.kind == "signal":
                return await (self._drain() if event.signal == signal.SIGTERM else self._end_now(event.signal))
            if status := await self._bury():
                return status

    async def _watch(self, seconds: float) -> None:
        """Make a worker that hangs a dead one."""
        if seconds:
            await asyncio.gather(*(self._watch_one(worker, seconds) for worker in self._crew.workers))

    async def _watch_one(self, worker: Worker, seconds: float) -> None:
        if worker.heartbeat is not None:
            await worker.heartbeat.stopped(seconds)
            turn = "step" if worker.computes else "message"
            self._crew.kill_hung(
                worker,
                f"it was stuck in one {turn} for {seconds:g} s and was killed (server.watchdog={seconds:g}: where a "
                f"{turn} may take longer, raise it; 0: never)",
            )
            self._events.put_nowait(_Event("news"))

    async def _drain(self) -> int:
        """Let running requests finish, and nobody else in."""
        dispatcher = self._dispatcher
        dispatcher.state, dispatcher.reason = "draining", "The server is shutting down."
        idle = asyncio.ensure_future(dispatcher.idle(self._config.server.drain_timeout))
        while not idle.done():
            happens = asyncio.ensure_future(self._events.get())
            await asyncio.wait({idle, happens}, return_when=asyncio.FIRST_COMPLETED)
            if not happens.done():
                happens.cancel()
            elif happens.result().kind == "signal":
                idle.cancel()
                return await self._end_now(happens.result().signal)
            elif status := await self._bury():
                idle.cancel()
                return status
        if not idle.result():
            dispatcher.fail("The server is shutting down, and the request took too long to finish.", 503)
        self._http.config.timeout_graceful_shutdown = int(FLUSH)
        return await self._end()

    async def _end_now(self, number: int) -> int:
        """End without waiting for requests: after SIGINT, or a second signal."""
        self._dispatcher.state, self._dispatcher.reason = "dead", "The server is shutting down."
        self._dispatcher.fail(self._dispatcher.reason, 503)
        await self._end()
        return _status_of(number)

    async def _end(self) -> int:
        """Send everybody home; those that don't go are killed later."""
        self._dispatcher.stop()
        await asyncio.to_thread(self._crew.join, GRACE)
        return 0

    async def _bury(self) -> int:
        """If a worker (or the HTTP server) has died, end with it: status 1. Otherwise 0."""
        dead = self._crew.dead()
        if not dead and not self._http_task.done():
            return 0
        what = f"{dead[0].role} died: {dead[0].exit_reason}" if dead else "the HTTP server ended"
        self._dispatcher.state, self._dispatcher.reason = "dead", f"The server can't go on, {what}"
        self._dispatcher.fail(self._dispatcher.reason)
        print(f"minisgl: {what}", file=sys.stderr, flush=True)
        await asyncio.gather(asyncio.to_thread(self._crew.kill), asyncio.sleep(UNHEALTHY_GRACE_SECONDS))
        return 1


def _status_of(number: int) -> int:
    """SIGTERM is how a server is asked to end; anything else is an interruption, as a shell counts it."""
    return 0 if number == signal.SIGTERM else 128 + number
