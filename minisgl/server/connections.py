"""The HTTP connections: how many there may be, and how long a client may take to send a request or to read a response.

uvicorn parses HTTP; this module adds the limits. A connection above the limit gets 503 with ``Retry-After``. A client
that sends its request too slowly gets 408. The connection of a client that does not read its response is closed, which
aborts the request.
"""

from __future__ import annotations

import asyncio
import resource
from typing import Any, ClassVar, NamedTuple

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

BODY_PIECE = 2**16
"""Bytes of a request's body that a client must send within each ``server.io_timeout``."""
REFUSED_SECONDS = 1.0
"""Seconds in which a client above the limit can read the response, before its connection is closed."""
_OTHER_FILES = 128
"""File descriptors that the launcher needs besides the connections: sockets and pipes to the workers, log, imports."""
_BODIES = {408: "The request took too long to arrive.", 503: "Too many connections are open: try again later."}


class Limits(NamedTuple):
    """The largest number of connections, and the largest number that the listener accepts at once."""

    connections: int
    backlog: int


def raise_file_limit() -> Limits:
    """Raise this process's soft limit of file descriptors to the hard limit, and return the limits that fit into it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2**16 if hard == resource.RLIM_INFINITY else min(hard, 2**16)
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    files = wanted if soft == resource.RLIM_INFINITY else soft
    backlog = max(1, min(2048, files // 4))  # connections above the limit need descriptors too, until they are refused
    return Limits(max(1, files - backlog - _OTHER_FILES), backlog)


class Connection(H11Protocol):
    """One HTTP connection. A subclass with other class variables, `limited`, has other limits."""

    max_connections: ClassVar[int]
    io_timeout: ClassVar[float]

    _timer: asyncio.TimerHandle | None = None  # ends a connection that sends its request too slowly
    _write_timer: asyncio.TimerHandle | None = None  # ends a connection whose client does not read
    _refused = False
    _received = 0  # bytes of the body since the timer began

    @classmethod
    def limited(cls, max_connections: int, io_timeout: float) -> type[Connection]:
        """Return the class of a server's connections."""
        return type("LimitedConnection", (cls,), {"max_connections": max_connections, "io_timeout": io_timeout})

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            self._refused = True
            self.connections.discard(self)
            self._answer(503, b"retry-after: 1\r\n")
            if transport.can_write_eof() and not transport.is_closing():
                transport.write_eof()
            self._timer = self.loop.call_later(REFUSED_SECONDS, transport.abort)
        else:
            self._timer = self.loop.call_later(self.io_timeout, self._on_slow_request)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        if self._write_timer is not None:
            self._write_timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        before = self.conn.their_state
        super().data_received(data)
        now = self.conn.their_state
        self._received += len(data)
        if now not in (h11.IDLE, h11.SEND_BODY):
            self._stop_timer()
        elif now is not before or self._timer is None or (now is h11.SEND_BODY and self._received >= BODY_PIECE):
            self._stop_timer()
            self._timer = self.loop.call_later(self.io_timeout, self._on_slow_request)

    def eof_received(self) -> None:
        if self._refused:
            self.transport.abort()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timer = self.loop.call_later(self.io_timeout, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self.loop.call_later(self.io_timeout, self.transport.abort)  # the client may have left a response unread

    def _stop_timer(self) -> None:
        self._received = 0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_slow_request(self) -> None:
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            self._answer(408)
        self.transport.close()
        self.loop.call_later(self.io_timeout, self.transport.abort)

    def _answer(self, status: int, headers: bytes = b"") -> None:
        """Write a whole response, past h11: the connection is closed after it."""
        kind = "timeout_error" if status == 408 else "server_error"
        body = b'{"error":{"message":"%s","type":"%s","param":null,"code":null}}' % (
            _BODIES[status].encode(),
            kind.encode(),
        )
        phrase = {408: b"Request Timeout", 503: b"Service Unavailable"}[status]
        head = b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n" % (
            status,
            phrase,
            len(body),
        )
        self.transport.write(head + headers + b"connection: close\r\n\r\n" + body)


def uvicorn_options(io_timeout: float) -> dict[str, Any]:
    """Return the arguments of `uvicorn.Config` that limit the connections. Raise this process's limit of files."""
    limits = raise_file_limit()
    return {"http": Connection.limited(limits.connections, io_timeout), "backlog": limits.backlog}
