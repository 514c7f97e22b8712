"""A small HTTP/1.1 client for one server, on asyncio: keep-alive connections, and a time for every piece of a body.

A general client library spends several times as much CPU time on a streamed token, and would sooner be the limit of a
measurement.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol
from urllib.parse import urlsplit

import h11

from minisgl.bench.loadgen.body import BodyDecoder, body_length
from minisgl.config import ConfigError


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
        base = parts.path.rstrip("/").removesuffix("/v1")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        tls = parts.scheme == "https"
        return ServerAddress(parts.hostname, port or (443 if tls else 80), tls, base, headers)

    @property
    def host_header(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


class Connection(asyncio.Protocol):
    """One connection. It carries one request at a time: h11 reads the head of the response, `BodyDecoder` the body."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._h11: h11.Connection | None = None
        self._body: BodyDecoder | None = None
        self._reader: BodyReader | None = None
        self._done: asyncio.Future[None] | None = None
        self._keep_alive = True
        self.answered = False
        """Whether a byte of the current response has arrived."""

    @property
    def usable(self) -> bool:
        """Whether the connection can carry another request."""
        return self._transport is not None and not self._transport.is_closing() and self._keep_alive

    async def post(self, target: str, headers: list[tuple[str, str]], body: bytes, reader: BodyReader) -> None:
        """Send a request and read its response. Raise `RequestError` if the response is not complete."""
        assert self._transport is not None
        self._h11, self._body = h11.Connection(h11.CLIENT), None
        self._reader, self.answered = reader, False
        self._done = asyncio.get_running_loop().create_future()
        head = self._h11.send(h11.Request(method="POST", target=target, headers=headers))
        self._transport.write((head or b"") + (self._h11.send(h11.Data(body)) or b""))
        self._h11.send(h11.EndOfMessage())
        try:
            await self._done
        except BaseException:
            self.close()
            raise
        finally:
            self._reader = self._done = None

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # ---- asyncio.Protocol ------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if self._done is None or self._done.done():  # nothing was asked for
            self.close()
            return
        self.answered = True
        try:
            if self._body is None:
                data = self._read_head(data)
            if self._body is not None:
                self._read_body(data, now)
        except (h11.RemoteProtocolError, ValueError) as error:
            self._end(RequestError(f"not a valid HTTP response: {error}"))

    def connection_lost(self, error: Exception | None) -> None:
        complete = self._body is not None and self._body.until_close and error is None
        self._end(
            None if complete else RequestError("the server closed the connection before the response was complete")
        )

    # ---- the response ----------------------------------------------------------------------------------

    def _read_head(self, data: bytes) -> bytes:
        """Read the head of the response, if it is complete. Return the bytes behind it."""
        assert self._h11 is not None and self._reader is not None
        self._h11.receive_data(data)
        event = self._h11.next_event()
        while isinstance(event, h11.InformationalResponse):
            event = self._h11.next_event()
        if not isinstance(event, h11.Response):
            return b""
        headers = list(event.headers)
        found = dict(headers)
        self._body = BodyDecoder(body_length(event.status_code not in (204, 304), headers))
        closing = b"close" in found.get(b"connection", b"").lower() or event.http_version != b"1.1"
        self._keep_alive = not (closing or self._body.until_close)
        self._reader.start(event.status_code, found.get(b"content-type", b"").decode("latin-1"))
        return self._h11.trailing_data[0]

    def _read_body(self, data: bytes, now: float) -> None:
        assert self._body is not None and self._reader is not None
        if content := self._body.feed(data):
            self._reader.feed(content, now)
        if self._body.done:
            self._keep_alive &= not self._body.extra
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
            raise RequestError(f"no connection: {error.strerror or error}") from error
        self._network_address = transport.get_extra_info("peername")[0]
        return connection

    async def _post_on(self, connection: Connection, path: str, body: bytes, reader: BodyReader) -> None:
        headers = [
            ("Host", self.address.host_header),
            ("Content-Type", "application/json"),
            ("Accept", "text/event-stream"),
            ("Content-Length", str(len(body))),
            *self.address.headers.items(),
        ]
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
