"""The HTTP server of a router: uvicorn, with the limits of a minisgl server. It installs no signal handlers."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from minisgl.config import Config, ServerConfig
from minisgl.server.app import wrapped
from minisgl.server.extension import HttpExtension, load_extensions, shipped
from minisgl.server.launcher import LISTEN
from minisgl.utils.process import raise_file_limit

CLOSE_SECONDS = 1
"""Seconds that open responses have to end when the server closes."""
START_POLL_SECONDS = 0.01
OTHER_FILES = 1024
"""File descriptors that a router needs besides those of the connections: pipes, KV events, idle connections."""


class _Server(uvicorn.Server):
    """A uvicorn server without uvicorn's signal handlers: the cluster handles the signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    """Serves an ASGI application at a listening socket. The options are those of a server."""

    def __init__(self, app: ASGIApp, listener: socket.socket, options: ServerConfig):
        self._listener = listener
        host, port = listener.getsockname()[:2]
        tls_cert = getattr(options, "tls_cert", None)  # an option of plugins/http
        self.url = f"{'https' if tls_cert else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"
        if hasattr(options, "max_connections"):
            options = replace(options, max_connections=_connections(options.max_connections))  # type: ignore[call-arg]
        limited = Config(server=options)
        tls = load_extensions(limited, names=["tls"]) if tls_cert else []
        uvicorn_options: dict[str, Any] = {"ws": "none"}
        for extension in (*load_some(limited, "connections"), *tls):
            uvicorn_options |= extension.uvicorn_options()
        self._server = _Server(
            uvicorn.Config(
                app,
                log_config=None,  # uvicorn's loggers use the handler of setup_logging
                access_log=False,
                interface="asgi3",
                lifespan="off",
                server_header=False,  # the replicas' responses have these two
                date_header=False,
                timeout_graceful_shutdown=CLOSE_SECONDS,
                timeout_keep_alive=60,
                **uvicorn_options,
            )
        )
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to serve."""
        self._task = asyncio.create_task(self._server.serve(sockets=[self._listener]))
        while not self._server.started and not self._task.done():
            await asyncio.sleep(START_POLL_SECONDS)
        self._listener.listen(LISTEN)  # uvicorn has set it to the number of connections that it accepts in one turn

    async def wait_until_ended(self) -> str:
        """Wait until the server has ended by itself. Return the reason."""
        assert self._task is not None
        await asyncio.wait({self._task})
        return "the HTTP server ended"

    async def close(self) -> None:
        """End the server, with its connections."""
        self._server.should_exit = True
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=CLOSE_SECONDS + 2.0)
            self._task.cancel()
        self._listener.close()


def observed(app: ASGIApp, options: ServerConfig) -> ASGIApp:
    """Return the application of a router with what a server has too: ids of requests, ``root_path``, the access log."""
    return wrapped(app, load_some(Config(server=options), "records", "root_path", "access_log"))


def _connections(most: int) -> int:
    """Return how many connections fit, at most ``most``: each needs a descriptor here, and one to a replica."""
    files = raise_file_limit(2 * most + OTHER_FILES)
    return max(1, min(most, (files - OTHER_FILES) // 2))


def load_some(config: Config, *names: str) -> list[HttpExtension]:
    """Build those of the named extensions that are shipped. A router of several servers uses them as a server does."""
    return load_extensions(config, names=[name for name in names if name in shipped()])
