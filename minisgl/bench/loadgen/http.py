"""A small HTTP/1.1 client for one server, on asyncio: keep-alive connections, and a time for every piece of a body.

Responses are parsed by llhttp, as in the server. A general client library spends several times as much CPU time on a
streamed token, and would sooner be the limit of a measurement.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol
from urllib.parse import urlsplit

import httptools

from minisgl.config import ConfigError

OWN_LACK = "the client is at its limit: "
"""Beginning of the reason for a failure that is not the server's."""
_LACKS = frozenset({errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS, errno.ENOMEM})
CLOSED = "the server closed the connection before the response was complete"


class RequestError(Exception):
    """A request that got no complete response. The message is the reason, without details of the single request."""


class BodyReader(Protocol):
    """Reads one response."""

    def start(self, status: int, content_type: str) -> None:
        """Read the status and the media type."""

    def feed(self, data: bytes, now: float) -> None:
        """Read a piece of the body, which arrived at ``now`` (`time.perf_counter`)."""


@dataclass(frozen=True)
class ServerAddress:
    """Where a server listens. ``base`` is the path before ``/v1``; ``headers`` are sent with every request."""

    host: str
    port: int
    tls: bool = False
    base: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def parse(url: str, api_key: str | None = None) -> ServerAddress:
        """Return the address that a URL names, such as ``http://127.0.0.1:1919``. Raise `ConfigError`."""
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
            raise ConfigError(f"url={url} is not the address of a server, such as http://127.0.0.1:1919.")
        if not (parts.path + parts.hostname + (api_key or "")).isascii() or not (api_key or "x").isprintable():
            raise ConfigError("url= and api_key= may contain printable ASCII characters only.")
        base = parts.path.rstrip("/").removesuffix("/v1")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        tls = parts.scheme == "https"
        return ServerAddress(parts.hostname, port or (443 if tls else 80), tls, base, headers)

    @property
    def host_header(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


class Connection(asyncio.Protocol):
    """One connection. It carries one request at a time. The methods ``on_…`` are called by httptools."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._reader: BodyReader | None = None
        self._done: asyncio.Future[None] | None = None
        self._now = 0.0
        self._headers: dict[bytes, bytes] = {}
        self._body_until_close = False
        self._keep_alive = True
        self.answered = False
        """Whether a byte of the current response has arrived."""

    @property
    def usable(self) -> bool:
        """Whether the connection can carry another request."""
        return self._transport is not None and not self._transport.is_closing() and self._keep_alive

    async def post(self, target: str, headers: Mapping[str, str], body: bytes, reader: BodyReader) -> None:
        """Send a request and read its response. Raise `RequestError` if the response is not complete."""
        assert self._transport is not None
        self._parser, self._reader = httptools.HttpResponseParser(self), reader
        self._body_until_close = self.answered = False
        self._done = asyncio.get_running_loop().create_future()
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self._transport.write(f"POST {target} HTTP/1.1\r\n{lines}\r\n".encode("latin-1") + body)
        try:
            await self._done
        except BaseException:
            self.close()
            raise
        finally:
            self._parser = self._reader = self._done = None

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # ---- asyncio.Protocol ------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        if self._parser is None or self._done is None or self._done.done():  # bytes that nothing asked for
            self.close()
            return
        self.answered = True
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._end(RequestError(f"not a valid HTTP response: {error}"))

    def connection_lost(self, error: Exception | None) -> None:
        complete = self._body_until_close and error is None
        self._end(None if complete else RequestError(CLOSED))

    # ---- httptools -------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._headers = {}
        if self._done is not None and self._done.done():  # a second response: the connection is out of step
            self._keep_alive = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        assert self._parser is not None and self._reader is not None
        status = self._parser.get_status_code()
        if status >= 200:
            self._body_until_close = not self._headers.keys() & {b"content-length", b"transfer-encoding"}
            self._reader.start(status, self._headers.get(b"content-type", b"").decode("latin-1"))

    def on_body(self, data: bytes) -> None:
        assert self._reader is not None
        self._reader.feed(data, self._now)

    def on_message_complete(self) -> None:
        assert self._parser is not None
        if self._parser.get_status_code() >= 200:
            self._keep_alive = self._parser.should_keep_alive()
            self._end(None)

    def _end(self, error: RequestError | None) -> None:
        if self._done is None or self._done.done():
            return
        if error is None:
            self._done.set_result(None)
        else:
            self._done.set_exception(error)


class HttpClient:
    """The connections of one client process to one server. A connection is reused when its response is complete."""

    def __init__(self, address: ServerAddress):
        self.address = address
        self._idle: list[Connection] = []
        self._network_address: str | None = None
        self._tls = ssl.create_default_context() if address.tls else None

    async def post(self, path: str, body: bytes, reader: BodyReader) -> None:
        """Send a JSON body and read the response. Raise `RequestError` if there is no complete response.

        A server may close an idle connection at the moment in which a request is sent. If it closes a reused connection
        without any response, the request is sent again on a new connection.
        """
        while connection := self._take_idle():
            try:
                await self._post_on(connection, path, body, reader)
                return
            except RequestError:
                if connection.answered:
                    raise
        await self._post_on(await self._connect(), path, body, reader)

    def _take_idle(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                return connection
        return None

    async def _connect(self) -> Connection:
        """Open a connection. Later connections use the network address of the first, without a name look-up."""
        loop, address = asyncio.get_running_loop(), self.address
        try:
            transport, connection = await loop.create_connection(
                Connection,
                self._network_address or address.host,
                address.port,
                ssl=self._tls,
                server_hostname=address.host if self._tls else None,
            )
        except OSError as error:
            lack = OWN_LACK if error.errno in _LACKS else ""
            raise RequestError(f"{lack}no connection: {error.strerror or error}") from error
        self._network_address = transport.get_extra_info("peername")[0]
        return connection

    async def _post_on(self, connection: Connection, path: str, body: bytes, reader: BodyReader) -> None:
        headers = {
            "Host": self.address.host_header,
            "Content-Type": "application/json",
            "Accept": "text/event-stream",
            "Content-Length": str(len(body)),
            **self.address.headers,
        }
        await connection.post(self.address.base + path, headers, body, reader)
        if connection.usable:
            self._idle.append(connection)
        else:
            connection.close()

    def close(self) -> None:
        """Close the idle connections."""
        for connection in self._idle:
            with contextlib.suppress(OSError):
                connection.close()
        self._idle.clear()
