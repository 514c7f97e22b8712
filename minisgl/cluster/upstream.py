"""The HTTP/1.1 client of a router: requests to one server over keep-alive connections, with streamed responses.

Responses are parsed by llhttp, as in the server, which costs little for each streamed piece. The pieces of a body are
passed on as they arrive. A reader that is slow stops the reading from the server.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import cast

import httptools

Headers = Sequence[tuple[bytes, bytes]]

IDLE_SECONDS = 20.0
"""Seconds after which an idle connection is not used again. The server closes it after 60."""
MAX_IDLE = 256
"""The largest number of idle connections to a server."""
MAX_BUFFERED = 2**18
"""Bytes of a body that wait for their reader. With more, the connection is not read."""
CONNECT_SECONDS = 5.0
"""Seconds in which a connection to the server must be open."""


class UpstreamError(Exception):
    """A request got no complete response. ``sent`` is False if the server has certainly not seen the request."""

    def __init__(self, message: str, sent: bool = True):
        super().__init__(message)
        self.sent = sent


class Connection(asyncio.Protocol):
    """One connection, which carries one request at a time. httptools calls the methods ``on_…``."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._wake: asyncio.Future[None] | None = None
        self._error = ""
        self._head_only = self._until_close = self._keep_alive = False
        self._buffered = 0
        self._pieces: deque[bytes] = deque()
        self.idle_since = 0.0
        self.answered = False
        """Whether a byte of the current response has arrived."""
        self.complete = True
        """Whether the current response is complete."""
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []

    @property
    def usable(self) -> bool:
        """Whether the connection can carry another request."""
        open_ = self._transport is not None and not self._transport.is_closing()
        # Pieces that were not read would be taken for the body of the next response.
        return open_ and self._keep_alive and self.complete and not self._pieces

    def send(self, method: bytes, target: bytes, headers: Headers, body: bytes) -> None:
        """Send a request. ``target`` is the path with the query."""
        assert self._transport is not None
        self._parser = httptools.HttpResponseParser(self)
        self._head_only = method == b"HEAD"
        self.answered = self.complete = self._until_close = self._keep_alive = False
        self.status, self.headers = 0, []
        lines = [b"%b %b HTTP/1.1\r\n" % (method, target)]
        lines += [b"%b: %b\r\n" % header for header in headers]
        self._transport.write(b"".join([*lines, b"\r\n", body]))

    async def read_head(self) -> None:
        """Wait for the status and the headers of the response. Raise `UpstreamError`."""
        while not self.status:
            await self._wait()

    async def read(self) -> bytes:
        """Return the next pieces of the body, or nothing at its end. Raise `UpstreamError` if the body breaks off."""
        while not self._pieces and not self.complete:
            await self._wait()
        body = b"".join(self._pieces)
        self._pieces.clear()
        if self._buffered > MAX_BUFFERED and self._transport is not None:
            self._transport.resume_reading()
        self._buffered = 0
        return body

    async def _wait(self) -> None:
        if self._error:
            raise UpstreamError(self._error)
        self._wake = asyncio.get_running_loop().create_future()
        await self._wake

    def _notify(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # ---- asyncio.Protocol ------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports are not of this class

    def data_received(self, data: bytes) -> None:
        if self._parser is None or self.complete:  # bytes that nothing asked for
            self._keep_alive = False
            self.close()
            return
        self.answered = True
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if not self.complete:
                self._fail(f"The server's response is not valid HTTP: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        if self._until_close and exc is None:
            self.complete = True
            self._notify()
        else:
            self._fail("The server closed the connection.")

    def _fail(self, error: str) -> None:
        if not self.complete:
            self._error = error
        self._keep_alive = False
        self.close()
        self._notify()

    # ---- httptools -------------------------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        status = self._parser.get_status_code()
        if status < 200:  # an interim response
            self.headers = []
            return
        self.status = status
        names = {name for name, _ in self.headers}
        self._until_close = not names & {b"content-length", b"transfer-encoding"}
        if self._head_only:  # it has no body, whatever its headers say
            self.complete = True
        self._notify()

    def on_body(self, body: bytes) -> None:
        self._pieces.append(body)
        before, self._buffered = self._buffered, self._buffered + len(body)
        if before <= MAX_BUFFERED < self._buffered and self._transport is not None:
            self._transport.pause_reading()
        self._notify()

    def on_message_complete(self) -> None:
        assert self._parser is not None
        if self.status and not self._head_only:
            self._keep_alive, self.complete = self._parser.should_keep_alive(), True
            self.idle_since = time.monotonic()
            self._notify()


class Upstream:
    """The connections to one server, at ``host`` and ``port``."""

    def __init__(self, host: str, port: int):
        self._host, self._port = host, port
        self._idle: deque[Connection] = deque()
        self._busy: set[Connection] = set()
        self._closed = False

    async def request(self, method: bytes, target: bytes, headers: Headers, body: bytes) -> Response:
        """Send a request and return the response once its headers have arrived. Raise `UpstreamError`.

        A server may close an idle connection at the moment in which a request is sent. If it closes a reused connection
        without any response, the request is sent again on a new connection.
        """
        sent = False
        if connection := self._take_idle():
            try:
                return await self._request_on(connection, method, target, headers, body)
            except UpstreamError:
                if connection.answered or self._closed:
                    raise
            sent = True
        try:
            connection = await self._connect()
        except UpstreamError as error:
            error.sent = sent
            raise
        return await self._request_on(connection, method, target, headers, body)

    async def _request_on(
        self, connection: Connection, method: bytes, target: bytes, headers: Headers, body: bytes
    ) -> Response:
        self._busy.add(connection)
        try:
            connection.send(method, target, headers, body)
            await connection.read_head()
        except BaseException:
            self.release(connection)
            raise
        return Response(self, connection)

    def _take_idle(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.usable and time.monotonic() - connection.idle_since < IDLE_SECONDS:
                return connection
            connection.close()
        return None

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                _, connection = await loop.create_connection(Connection, self._host, self._port)
        except (OSError, TimeoutError) as error:
            raise UpstreamError(f"No connection to the server: {error}", sent=False) from error
        return connection

    def release(self, connection: Connection) -> None:
        """Keep a connection whose response is complete for the next request. Close any other connection."""
        self._busy.discard(connection)
        if connection.usable and len(self._idle) < MAX_IDLE:
            self._idle.append(connection)
        else:
            connection.close()

    def close(self) -> None:
        """Close all connections. Open requests end with `UpstreamError`."""
        self._closed = True
        for connection in (*self._idle, *self._busy):
            connection.close()
        self._idle.clear()


class Response:
    """A response, whose body is read piece by piece. Call `close` when it is no longer needed."""

    def __init__(self, upstream: Upstream, connection: Connection):
        self.status, self.headers = connection.status, connection.headers
        self._upstream, self._connection = upstream, connection

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the pieces of the body. Raise `UpstreamError` if it breaks off."""
        while piece := await self._connection.read():
            yield piece

    async def body(self) -> bytes:
        """Return the whole body. Raise `UpstreamError` if it breaks off."""
        return b"".join([piece async for piece in self.pieces()])

    def close(self) -> None:
        """Give the connection back, or close it if the response is not complete, so that the server aborts it."""
        self._upstream.release(self._connection)
