"""The HTTP connections: how many there may be, and how long a client may take to send a request or to read a response.

uvicorn serves HTTP with the parser llhttp (the package httptools), in its strict mode; this module adds the limits. A
client that sends its request too slowly gets 408, and one whose headers are too large gets 431. The connection of a
client that does not read its response is closed, which aborts the request. If too many connections are open, a new one
takes the place of the one that has waited longest for a request, or for the next part of its body. If there is none,
the new one gets 503 with ``Retry-After``, unless it asks for ``/health`` or ``/ready``.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
from collections import deque
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, ClassVar, NamedTuple

import httptools
import msgspec
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from minisgl import hookimpl
from minisgl.config import Config
from minisgl.server.errors import ApiError
from minisgl.server.extension import HttpExtension
from minisgl.utils.log import is_logged
from minisgl.utils.process import raise_file_limit

log = logging.getLogger(__name__)

MAX_HEAD = 2**16
"""The largest size of a request's line and headers, in bytes. The last piece that was received is not counted."""
MAX_HEADERS = 256
"""The largest number of headers of a request."""
MAX_PIPELINED = 16
"""The largest number of requests that a client may send before it has read the response to the first one."""
BODY_PIECE = 2**16
"""Bytes of a request's body that a client must send within each ``server.io_timeout``."""
TURN_REQUESTS = 4
"""The largest number of requests that the server begins to handle in one turn of its event loop.

So a burst of requests does not delay ``/health`` and the connections of other clients by the time of all its requests.
"""
TURN_CONNECTIONS = 64
"""The largest number of connections that the server accepts in one turn of its event loop."""
PROBES = ("/health", "/ready")
"""The ends of the paths of requests that do not wait for other requests."""
_PROBES = tuple(path.encode() for path in PROBES)
REFUSED = 512
"""The largest number of connections above the limit that get a response. Further ones are closed without one."""
REFUSED_SECONDS = 1.0
"""Seconds in which a client above the limit can send the headers of a request, and then read the response."""
_OTHER_FILES = 128
"""File descriptors that the launcher needs besides the connections: sockets and pipes to the workers, log, imports."""
_UPGRADE_HEADERS = (b"connection", b"upgrade", b"http2-settings")


@hookimpl
def minisgl_http(config: Config) -> HttpExtension:
    return ConnectionLimits(config.server.max_connections, config.server.io_timeout)


class ConnectionLimits(HttpExtension):
    """Lets uvicorn make connections with limits."""

    options = ("max_connections", "io_timeout")

    def __init__(self, max_connections: int, io_timeout: float):
        self._max_connections, self._io_timeout = max_connections, io_timeout

    def uvicorn_options(self) -> Mapping[str, Any]:
        log_accept_errors(asyncio.get_running_loop())
        return uvicorn_options(self._max_connections, self._io_timeout)


class Limits(NamedTuple):
    """The largest number of connections, and of further ones that are being refused at the same time."""

    connections: int
    refused: int


def limits_for(max_connections: int) -> Limits:
    """Raise this process's limit of file descriptors for ``max_connections`` and return the limits that fit."""
    files = raise_file_limit(max_connections + REFUSED + _OTHER_FILES)
    refused = max(1, min(REFUSED, files // 4))  # connections above the limit need descriptors until they are closed
    return Limits(max(1, min(max_connections, files - refused - _OTHER_FILES)), refused)


class Connection(HttpToolsProtocol):
    """One HTTP connection. `limited` returns the class of one server's connections, which share the class variables."""

    limits: ClassVar[Limits]
    io_timeout: ClassVar[float]
    waiting: ClassVar[dict[Connection, float]]
    """The connections that wait for a request's headers, and the times when they began to, the longest wait first."""
    receiving: ClassVar[dict[Connection, float]]
    """The same of those that wait for a request's body. The wait begins anew with each `BODY_PIECE`."""
    refused: ClassVar[set[Connection]]
    """The connections above the limit that are not closed yet."""
    unhandled: ClassVar[deque[tuple[Connection, RequestResponseCycle, ASGI3Application]]]
    """The requests that the application does not handle yet."""

    _timer: asyncio.TimerHandle | None = None  # ends a connection that sends its request too slowly
    _write_timer: asyncio.TimerHandle | None = None  # ends a connection whose client does not read
    _unparsed = 0  # bytes that were received since the parser last reported a part of a request
    _received = 0  # bytes of the body since the timer began
    _in_body = False  # the headers of the request that is being parsed are complete, its body may not be
    _over_limit = False  # too many connections were open when it was made: only a probe gets another answer than 503
    _upgrade = False  # the request that is being parsed asks for another protocol
    _ended = False  # an error was written that ends the connection: the rest that the client sends is not parsed

    @classmethod
    def limited(cls, limits: Limits, io_timeout: float) -> type[Connection]:
        """Return a class of connections with these limits."""
        shared: dict[str, Any] = {"waiting": {}, "receiving": {}, "refused": set(), "unhandled": deque()}
        return type("LimitedConnection", (cls,), {"limits": limits, "io_timeout": io_timeout, **shared})

    # ---- the connection --------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.limits.connections and not self._close_longest_waiting():
            self._admit_probe()
        else:
            self.waiting[self] = self.loop.time()
            self._restart_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self.waiting.pop(self, None)
        self.receiving.pop(self, None)
        self.refused.discard(self)
        self._stop_timer()
        self._stop_write_timer()
        super().connection_lost(exc)

    def eof_received(self) -> None:
        if self._ended:
            self.transport.abort()

    def _close_longest_waiting(self) -> bool:
        """Close the connection that has waited longest for a request or its body. Return False if none does.

        A connection whose client has not received the whole last response does not count.
        """
        idle = next((each for each in self.waiting if not each.transport.get_write_buffer_size()), None)
        half = next((each for each in self.receiving if not each._is_responding()), None)
        longest = idle or half
        if idle is not None and half is not None and self.receiving[half] < self.waiting[idle]:
            longest = half
        if longest is not None:
            longest.connections.discard(longest)
            self.waiting.pop(longest, None)
            self.receiving.pop(longest, None)
            longest.transport.abort()
        return longest is not None

    def _is_responding(self) -> bool:
        """Return whether a response is under way, to the request whose body is being received or to an earlier one."""
        return self.cycle.response_started or self._responds_to_earlier_request()

    def _admit_probe(self) -> None:
        """Wait for the headers of a request, although too many connections are open: it may be a probe."""
        self.connections.discard(self)
        if len(self.refused) >= self.limits.refused:
            self.transport.abort()
            return
        self.refused.add(self)
        self._over_limit = True
        self._timer = self.loop.call_later(REFUSED_SECONDS, self._on_slow_request)

    def _refusal(self) -> ApiError:
        if len(self.refused) == 1:  # the others have been reported
            log.warning("%d connections are open: new ones are refused (server.max_connections)", len(self.connections))
        return ApiError(503, "Too many connections are open: try again later.", headers={"retry-after": "1"})

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timer = self.loop.call_later(self.io_timeout, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_write_timer()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._abort_if_unread()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self._abort_if_unread()
        elif self.cycle.response_complete:
            self.waiting[self] = self.loop.time()

    def _abort_if_unread(self) -> None:
        """Abort the closing connection after ``server.io_timeout`` if its client has not read the last response."""
        if self.transport.get_write_buffer_size():
            self.loop.call_later(self.io_timeout, self.transport.abort)

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    # ---- requests ----------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self._ended:
            return
        self._unset_keepalive_if_required()
        self._unparsed += len(data)
        try:
            while data:
                data = self._feed(data)
            error = None
        except httptools.HttpParserError:
            error = ApiError(400, "Invalid HTTP request received.")
        if self._unparsed > MAX_HEAD:
            message = f"The request has more than {MAX_HEAD} bytes of headers, or more than {MAX_HEADERS} headers."
            error = ApiError(431, message)
        if error is not None:
            self._end(self._refusal() if self._over_limit else error)

    def _feed(self, data: bytes) -> bytes:
        """Parse received bytes. Return bytes to parse next: those of a request that asked for another protocol.

        The server answers such a request as if it had not asked (RFC 9110, section 7.8). llhttp does not parse the body
        of such a request, so a new parser gets the request without these headers.
        """
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as stop:
            if self.parser.get_method() == b"CONNECT":
                raise httptools.HttpParserError from None
            self._upgrade = False
            head = [self.parser.get_method(), b" ", self.url, b" HTTP/1.1\r\n"]
            for name, value in self.headers:
                if name not in _UPGRADE_HEADERS:
                    head += [name, b": ", value, b"\r\n"]
            self.parser = httptools.HttpRequestParser(self)
            return b"".join([*head, b"\r\n", data[stop.args[0] :]])
        return b""

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._unparsed, self._in_body = 0, False
        self._restart_timer()

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_body:  # a header after the body, a trailer, is ignored
            if len(self.headers) == MAX_HEADERS:
                self._unparsed = MAX_HEAD + 1
                raise ValueError("too many headers")
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._unparsed = 0
        if self.parser.should_upgrade():
            self._upgrade = True
            return
        hosts = sum([name == b"host" for name, _ in self.headers])
        if hosts > 1 or (hosts == 0 and self.parser.get_http_version() == "1.1"):
            raise ValueError("a request needs one Host header")
        if len(self.pipeline) >= MAX_PIPELINED:
            raise ValueError("too many pipelined requests")
        if self._over_limit and not self.url.partition(b"?")[0].endswith(_PROBES):
            raise ValueError("too many connections")
        super().on_headers_complete()
        if self._over_limit:
            self.cycle.keep_alive = False
        self.waiting.pop(self, None)
        self.receiving[self] = self.loop.time()
        self._in_body = True
        self._restart_timer()

    def on_body(self, body: bytes) -> None:
        self._unparsed = 0
        self._received += len(body)
        if self._received >= BODY_PIECE and not self.cycle.response_complete:
            self._restart_timer()
            self.receiving.pop(self, None)
            self.receiving[self] = self.loop.time()
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unparsed = 0
        self.receiving.pop(self, None)
        if not self._upgrade:
            self._stop_timer()
            super().on_message_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        if cycle.scope["path"].endswith(PROBES):
            super()._start_asgi_task(cycle, app)
            return
        self.unhandled.append((self, cycle, app))
        if len(self.unhandled) == 1:
            self.loop.call_soon(self._handle_some)

    @classmethod
    def _handle_some(cls) -> None:
        """Let the application handle the next `TURN_REQUESTS` requests whose clients have not disconnected."""
        for _ in range(min(TURN_REQUESTS, len(cls.unhandled))):
            connection, cycle, app = cls.unhandled.popleft()
            if not cycle.disconnected:
                HttpToolsProtocol._start_asgi_task(connection, cycle, app)
        if cls.unhandled:
            asyncio.get_running_loop().call_soon(cls._handle_some)

    # ---- too slow, too large, or no HTTP -------------------------------------------------------------------------

    def _restart_timer(self) -> None:
        if self._over_limit:  # it keeps the shorter time that it has
            return
        self._stop_timer()
        self._timer = self.loop.call_later(self.io_timeout, self._on_slow_request)

    def _stop_timer(self) -> None:
        self._received = 0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_slow_request(self) -> None:
        if self._responds_to_earlier_request():
            self._restart_timer()  # the server may have stopped reading until then
        else:
            self._end(self._refusal() if self._over_limit else ApiError(408, "The request took too long to arrive."))

    def _responds_to_earlier_request(self) -> bool:
        """Return whether a response is under way, or waits, to a request before the one that is being parsed."""
        if self._in_body:
            return bool(self.pipeline)
        return self.cycle is not None and not self.cycle.response_complete

    def _end(self, error: ApiError) -> None:
        """End the connection, with ``error`` unless a response is under way or the request has had its own."""
        self._stop_timer()
        if self._responds_to_earlier_request() or (self._in_body and self.cycle.response_started):
            self.transport.abort()
        else:
            self._write_error(error)

    def _write_error(self, error: ApiError) -> None:
        """Write a whole response, and close the connection when the client has had time to read it."""
        body = msgspec.json.encode(error.body)
        fixed = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
        head = f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n"
        head += "".join(f"{name}: {value}\r\n" for name, value in {**fixed, **error.headers}.items())
        self._ended = True
        self.transport.write(f"{head}\r\n".encode() + body)
        if self.transport.can_write_eof() and not self.transport.is_closing():
            with contextlib.suppress(OSError):  # the client may have closed the connection
                self.transport.write_eof()
        self._timer = self.loop.call_later(REFUSED_SECONDS, self.transport.abort)


def log_accept_errors(loop: asyncio.AbstractEventLoop) -> None:
    """Let ``loop`` log errors for lack of file descriptors or memory in one line, and not one traceback per attempt."""
    scarce = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
    times = 0

    def handle(loop: asyncio.AbstractEventLoop, context: Mapping[str, Any]) -> None:
        nonlocal times
        error = context.get("exception")
        if not isinstance(error, OSError) or error.errno not in scarce:
            loop.default_exception_handler(dict(context))
            return
        times += 1
        if is_logged(times):
            log.error("can't accept a connection (%d times so far): %s", times, error)

    loop.set_exception_handler(handle)


def uvicorn_options(max_connections: int, io_timeout: float) -> dict[str, Any]:
    """Return the arguments of `uvicorn.Config` that limit the connections. Raise this process's limit of files."""
    limits = limits_for(max_connections)
    return {"http": Connection.limited(limits, io_timeout), "backlog": TURN_CONNECTIONS}
