"""The HTTP side of a router, whatever connects it with the replicas: an ASGI application that passes requests on.

A request is passed on as it is, and so is the response, piece by piece: bodies are not changed. What the application
adds is a second attempt: a request whose replica fails before a byte of the response was sent to the client goes to
another replica. If the client disconnects, the response of the replica is closed, which aborts the request there.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import NamedTuple, Protocol

import msgspec
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message, Receive, Scope, Send

from minisgl.cluster.upstream import UpstreamError
from minisgl.server.app import is_authorized
from minisgl.server.errors import CLIENT_CLOSED_REQUEST, ApiError, timed_out
from minisgl.server.generate import Json, wait_for_disconnect
from minisgl.server.request_record import record_of

log = logging.getLogger(__name__)

GENERATE = ("/v1/chat/completions", "/v1/completions")
"""The paths of requests that the routing policy chooses a replica for."""
MAX_RESENT = 1
"""How often a request is sent again that a replica has seen: a request that kills servers must not reach all."""
MAX_BUFFERED = 1 << 28
"""Bytes of all bodies that the router keeps, so that it can send a request again. With more it refuses requests."""
HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer transfer-encoding "
    b"upgrade http2-settings expect".split()
)
"""Headers that belong to one connection (RFC 9110, section 7.6.1)."""


OWN_HEADERS = frozenset((b"content-length", b"x-request-id", b"x-forwarded-for", b"x-forwarded-proto"))
"""Headers of a request that the router writes itself."""


class PromptView(NamedTuple):
    """What a policy is told of a request: see `RoutingPolicy.choose` and `Replica.start`."""

    block_hashes: Sequence[int] = ()
    prompt_tokens: int = 0
    output_tokens: int = 0


class BodyBuffer:
    """The bodies that a router keeps, with a bound for all of them: `MAX_BUFFERED`, or one body of the largest size."""

    def __init__(self) -> None:
        self.size = 0
        """Bytes of all bodies that are kept."""

    def add(self, size: int, max_body: int) -> None:
        """Count further bytes. Raise `ApiError` (503) if they are too many."""
        if self.size + size > max(MAX_BUFFERED, max_body):
            message = "The router has too many bytes of other requests: try again later."
            raise ApiError(503, message, headers={"retry-after": "1"})
        self.size += size


class Body:
    """The body of one request, whose bytes count in a buffer from their arrival until `release`."""

    def __init__(self, buffer: BodyBuffer) -> None:
        self.data = b""
        self._buffer, self._counted = buffer, 0

    async def read(self, request: Request, limit: int) -> None:
        """Read the body. Raise `ApiError` if it is larger than ``limit`` bytes (413), or the buffer is full (503)."""

        def too_large() -> ApiError:
            return ApiError(413, f"The body is larger than {limit} bytes (server.max_body).", code="request_too_large")

        length = request.headers.get("content-length", "")
        if length.isascii() and length.isdigit() and (len(length) > 18 or int(length) > limit):
            raise too_large()
        body = bytearray()
        try:
            async for part in request.stream():
                body += part
                if len(body) > limit:
                    raise too_large()
                self._buffer.add(len(part), limit)
                self._counted += len(part)
        except ClientDisconnect:
            raise ApiError(CLIENT_CLOSED_REQUEST, "The client disconnected.") from None
        self.data = bytes(body)

    def release(self) -> None:
        """Drop the bytes: the request will not be sent again."""
        self._buffer.size -= self._counted
        self.data, self._counted = b"", 0


PromptReader = Callable[[str, Headers, bytes], Awaitable[PromptView]]
"""Reads the prompt of a request from its path, its headers and its body."""


class Attempt(Protocol):
    """One attempt to get the response to a request: it belongs to one replica."""

    @property
    def name(self) -> str:
        """The replica's name for the log. It may be empty before `request` has returned."""

    @property
    def others_left(self) -> bool:
        """Whether another living replica has not been tried. It may be wrong before `request` has returned."""

    async def request(
        self, method: bytes, target: bytes, headers: Sequence[tuple[bytes, bytes]], body: bytes
    ) -> Response:
        """Send the request. Return the response once its headers have arrived. Raise `UpstreamError`."""

    def first_token(self) -> None:
        """Record that a piece of the response has arrived. A second call does nothing."""

    def end(self) -> None:
        """Record the end of the attempt."""


class Response(Protocol):
    """The response of a replica, whose body is read piece by piece. `close` is called when it is no longer needed."""

    @property
    def status(self) -> int: ...

    @property
    def headers(self) -> Sequence[tuple[bytes, bytes]]: ...

    def pieces(self) -> AsyncIterator[bytes]:
        """Yield the pieces of the body. Raise `UpstreamError` if it breaks off."""

    def close(self) -> None:
        """End the response. If it is not complete, the replica aborts the request."""


class Relay:
    """The ASGI application. A subclass chooses the replica of each attempt, in `_begin`.

    ``max_body`` is the largest size of a body in bytes. ``read_prompt`` is called for the paths of `GENERATE`. The body
    of a request without ``api_key`` is not read, and the replica refuses the request. ``request_timeout`` is the number
    of seconds in which a response must begin, or None for no limit.
    """

    def __init__(
        self,
        read_prompt: PromptReader,
        max_body: int,
        api_key: str | None = None,
        request_timeout: float | None = None,
    ):
        self.max_body = max_body
        self.retries = 0
        """Requests that were sent to another replica because the first one failed."""
        self._api_key, self._timeout = api_key, request_timeout
        self._read_prompt = read_prompt
        self._buffer = BodyBuffer()
        self._idle = asyncio.Event()
        self._idle.set()
        self._open = 0

    def _begin(self, view: PromptView, generate: bool, before: Sequence[Attempt]) -> Attempt:
        """Return the next attempt for a request. Raise `ApiError` (503) if no replica is left for it.

        ``generate`` is whether the request is one of `GENERATE`. ``before`` are its attempts so far.
        """
        raise NotImplementedError

    async def wait_until_idle(self, seconds: float) -> bool:
        """Wait until no request is open, for at most ``seconds``. Return whether none is open."""
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        except TimeoutError:
            pass
        return not self._open

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._open += 1
        self._idle.clear()
        try:
            await self._pass_on(path_of(scope), scope, receive, send)
        except asyncio.CancelledError:  # by an HTTP server that has noticed the disconnect itself
            record_of(scope).status = record_of(scope).status or CLIENT_CLOSED_REQUEST
            raise
        except ApiError as error:
            record_of(scope).error = error.message
            await Json(error.body, error.status, error.headers)(scope, receive, send)
        finally:
            self._open -= 1
            if not self._open:
                self._idle.set()

    async def _pass_on(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        body = Body(self._buffer)
        try:
            await self._read_body(scope, receive, body)
            await self._relay_while_connected(path, scope, receive, send, body)
        finally:
            body.release()

    async def _relay_while_connected(self, path: str, scope: Scope, receive: Receive, send: Send, body: Body) -> None:
        """Run `_relay` until it is done or the client disconnects. Raise `ApiError` (504) if it takes too long."""
        work = asyncio.ensure_future(self._relay(path, scope, body, send))
        disconnect = asyncio.ensure_future(wait_for_disconnect(receive))
        tasks = {work, disconnect}
        record = record_of(scope)
        try:
            left = self._seconds_left(scope)
            done, _ = await asyncio.wait(tasks, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                if not record.status:
                    raise timed_out(self._timeout)
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)  # the replica ends a stream
            if work.done():
                work.result()
            else:
                record.status = record.status or CLIENT_CLOSED_REQUEST
        finally:
            work.cancel()
            disconnect.cancel()
            await asyncio.gather(work, disconnect, return_exceptions=True)

    async def _read_body(self, scope: Scope, receive: Receive, body: Body) -> None:
        """Read the body of a request, or nothing without the API key: the replica refuses the request anyway.

        Raise `ApiError` if the body is too large (413), if the bodies of all requests are (503), or if it does not
        arrive in time (504).
        """
        if not is_authorized(Headers(scope=scope).get("authorization", ""), self._api_key):
            return
        try:
            async with asyncio.timeout(self._seconds_left(scope)):
                await body.read(Request(scope, receive), self.max_body)
        except TimeoutError:
            raise timed_out(self._timeout) from None

    def _seconds_left(self, scope: Scope) -> float | None:
        """Return the seconds in which the response must begin, or None for no limit."""
        return None if self._timeout is None else max(self._timeout - record_of(scope).seconds, 0.0)

    async def _relay(self, path: str, scope: Scope, body: Body, send: Send) -> None:
        """Send the request to one replica after the other until one answers, and pass its response on."""
        generate = path in GENERATE and scope["method"] == "POST"
        view = await self._read_prompt(path, Headers(scope=scope), body.data) if generate else PromptView()
        attempts: list[Attempt] = []
        resent = 0
        while True:
            attempt = self._begin(view, generate, attempts)
            attempts.append(attempt)
            try:
                record_of(scope).error = ""  # that of the attempt before
                await self._attempt(attempt, scope, body, send, resent >= MAX_RESENT)
                return
            except UpstreamError as error:
                log.warning("%s: a request failed: %s", attempt.name, error)
                record_of(scope).error = str(error)
                if error.sent and resent >= MAX_RESENT:
                    raise ApiError(502, f"The replica failed: {error}") from error
                resent += error.sent
                self.retries += 1
            finally:
                attempt.end()

    async def _attempt(self, attempt: Attempt, scope: Scope, body: Body, send: Send, last: bool) -> None:
        """Send the request to one replica and pass its response on.

        Raise `UpstreamError` if the replica fails, or refuses with 503 and this is not the ``last`` attempt, before a
        byte was sent to the client. The headers of the response wait for the first piece of its body until then.
        """
        target = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
        headers = _request_headers(scope, len(body.data))
        response = await attempt.request(scope["method"].encode(), target, headers, body.data)
        begun = False

        async def begin() -> None:
            record_of(scope).status = response.status
            await send(start)

        try:
            if response.status == 503 and attempt.others_left and not last:
                raise UpstreamError("it refused the request (503)")
            start = _response_start(response)
            async for piece in response.pieces():
                if not begun:
                    body.release()
                    await begin()
                    begun = True
                attempt.first_token()
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            if not begun:
                await begin()
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except UpstreamError as error:
            if not begun:
                raise
            await self._end_broken(scope, response, send, error)
        finally:
            response.close()

    async def _end_broken(self, scope: Scope, response: Response, send: Send, error: UpstreamError) -> None:
        """End a response that broke off: an event stream with an error event, any other by closing the connection."""
        record_of(scope).error = str(error)
        kind = dict(response.headers).get(b"content-type", b"")
        if not kind.startswith(b"text/event-stream"):
            raise RuntimeError(f"the response broke off: {error}")  # uvicorn closes the connection
        event = ApiError(502, "The replica died before the response was complete.").body
        data = b"\n\ndata: " + msgspec.json.encode(event) + b"\n\n"  # the last event may be incomplete
        await send({"type": "http.response.body", "body": data, "more_body": False})


def path_of(scope: Scope) -> str:
    """Return the path of a request, without the prefix of the option ``server.root_path``."""
    return scope["path"].removeprefix(scope.get("root_path", "")) or "/"


def _request_headers(scope: Scope, length: int) -> list[tuple[bytes, bytes]]:
    """Return the headers for the replica: the client's, without those of its connection, and those of the router.

    ``length`` is that of the body.

    The replica believes the router's ``X-Forwarded-For``, so a client must not write it.
    """
    dropped = HOP_BY_HOP | _named_by_connection(scope["headers"]) | OWN_HEADERS
    headers = [(name, value) for name, value in scope["headers"] if name not in dropped]
    headers.append((b"x-request-id", record_of(scope).id.encode()))
    headers.append((b"x-forwarded-proto", scope["scheme"].encode()))
    if scope.get("client"):
        headers.append((b"x-forwarded-for", scope["client"][0].encode()))
    if length or scope["method"] in ("POST", "PUT", "PATCH"):
        headers.append((b"content-length", str(length).encode()))
    return headers


def _response_start(response: Response) -> Message:
    """Return the message that begins the response to the client. The middleware adds the request's id again."""
    dropped = HOP_BY_HOP | _named_by_connection(response.headers) | {b"x-request-id"}
    headers = [(name, value) for name, value in response.headers if name not in dropped]
    return {"type": "http.response.start", "status": response.status, "headers": headers}


def _named_by_connection(headers: Sequence[tuple[bytes, bytes]]) -> frozenset[bytes]:
    """Return the names of the headers that ``Connection`` declares to be hop-by-hop."""
    values = b",".join(value for name, value in headers if name == b"connection")
    return frozenset(name.strip().lower() for name in values.split(b","))
