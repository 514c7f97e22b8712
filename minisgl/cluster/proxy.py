"""The HTTP side of a router: an ASGI application that passes each request on to a replica.

A request is passed on as it is, and so is the response, piece by piece: bodies are not changed. What the application
adds is the choice of the replica, and a second attempt: a request whose replica fails before a byte of the response
was sent to the client goes to another replica. If the client disconnects, the connection to the replica is closed,
which aborts the request there.
"""

from __future__ import annotations

import asyncio
import hmac
import itertools
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

import msgspec
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from minisgl.cluster.routing import NoReplicaError, Replica, RoutingPolicy
from minisgl.cluster.status import PATHS, ClusterStatus
from minisgl.cluster.upstream import Response, Upstream, UpstreamError
from minisgl.server.app import read_body
from minisgl.server.errors import ApiError
from minisgl.server.generate import CLIENT_CLOSED_REQUEST, Json
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

        def count(size: int) -> None:
            self._buffer.add(size, limit)
            self._counted += size

        self.data = await read_body(request, limit, count)

    def release(self) -> None:
        """Drop the bytes: the request will not be sent again."""
        self._buffer.size -= self._counted
        self.data, self._counted = b"", 0


PromptReader = Callable[[str, Headers, bytes], Awaitable[PromptView]]
"""Reads the prompt of a request from its path, its headers and its body."""


class Proxy:
    """The ASGI application.

    ``max_body`` is the largest size of a body in bytes. ``read_prompt`` is called for the paths of `GENERATE`. The body
    of a request without ``api_key`` is not read, and the replica refuses the request. ``request_timeout`` is the number
    of seconds in which a response must begin, or None for no limit. The lists ``replicas`` and ``upstreams`` have the
    same order; `connect` and `disconnect` change them.
    """

    def __init__(
        self,
        policy: RoutingPolicy,
        status: ClusterStatus,
        read_prompt: PromptReader,
        max_body: int,
        api_key: str | None = None,
        request_timeout: float | None = None,
    ):
        self.replicas: list[Replica] = []
        self.max_body = max_body
        self._api_key, self._timeout = api_key, request_timeout
        self._upstreams: list[Upstream | None] = []
        self._policy, self._status, self._read_prompt = policy, status, read_prompt
        self._keys = itertools.count()
        self._buffer = BodyBuffer()
        self._idle = asyncio.Event()
        self._idle.set()
        self._open = 0
        status.update = self._update

    # ---- replicas --------------------------------------------------------------------------------------------

    def connect(self, index: int, host: str, port: int, block_size: int) -> Replica:
        """Send requests to replica ``index`` from now on. Return its view, which is empty."""
        while len(self.replicas) <= index:
            self.replicas.append(Replica(block_size))
            self.replicas[-1].stop()
            self._upstreams.append(None)
        self.replicas[index], self._upstreams[index] = Replica(block_size), Upstream(host, port)
        return self.replicas[index]

    def disconnect(self, index: int) -> None:
        """Send no request to replica ``index`` any more, and break off those that it has."""
        if index < len(self.replicas):
            self.replicas[index].stop()
            upstream, self._upstreams[index] = self._upstreams[index], None
            if upstream is not None:
                upstream.close()

    async def _update(self) -> None:
        for status, replica in zip(self._status.replicas, self.replicas, strict=False):
            status.open_requests, status.cached_blocks = replica.requests, len(replica.blocks)

    async def wait_until_idle(self, seconds: float) -> bool:
        """Wait until no request is open, for at most ``seconds``. Return whether none is open."""
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        except TimeoutError:
            pass
        return not self._open

    # ---- requests --------------------------------------------------------------------------------------------

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"].removeprefix(scope.get("root_path", "")) or "/"
        if path in PATHS and scope["method"] in ("GET", "HEAD"):
            await (await self._status.response(path))(scope, receive, send)
            return
        self._open += 1
        self._idle.clear()
        try:
            await self._pass_on(path, scope, receive, send)
        except ApiError as error:
            record_of(scope).error = error.message
            await Json(error.body, error.status, error.headers)(scope, receive, send)
        finally:
            self._open -= 1
            if not self._open:
                self._idle.set()

    async def _pass_on(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        self._status.check_ready()
        body = Body(self._buffer)
        try:
            await self._read_body(scope, receive, body)
            await self._relay_while_connected(path, scope, receive, send, body)
        finally:
            body.release()

    async def _relay_while_connected(self, path: str, scope: Scope, receive: Receive, send: Send, body: Body) -> None:
        """Run `_relay` until it is done or the client disconnects. Raise `ApiError` (504) if it takes too long."""
        work = asyncio.ensure_future(self._relay(path, scope, body, send))
        disconnect = asyncio.ensure_future(_wait_for_disconnect(receive))
        tasks = {work, disconnect}
        record = record_of(scope)
        try:
            left = self._seconds_left(scope)
            done, _ = await asyncio.wait(tasks, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                if not record.status:
                    raise self._too_long()
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
        if not is_authorized(Headers(scope=scope), self._api_key):
            return
        try:
            async with asyncio.timeout(self._seconds_left(scope)):
                await body.read(Request(scope, receive), self.max_body)
        except TimeoutError:
            raise self._too_long() from None

    def _seconds_left(self, scope: Scope) -> float | None:
        """Return the seconds in which the response must begin, or None for no limit."""
        return None if self._timeout is None else max(self._timeout - record_of(scope).seconds, 0.0)

    def _too_long(self) -> ApiError:
        return ApiError(504, f"The request took longer than {self._timeout or 0:g} s (server.request_timeout).")

    async def _relay(self, path: str, scope: Scope, body: Body, send: Send) -> None:
        """Send the request to one replica after the other until one answers, and pass its response on."""
        generate = path in GENERATE and scope["method"] == "POST"
        headers = Headers(scope=scope)
        view = await self._read_prompt(path, headers, body.data) if generate else PromptView()
        tried: set[int] = set()
        resent = 0
        while True:
            index = self._choose(view, generate, tried)
            tried.add(index)
            replica, upstream = self.replicas[index], self._upstreams[index]
            assert upstream is not None
            key = next(self._keys)
            replica.start(key, view.block_hashes, view.prompt_tokens, view.output_tokens)
            self._status.replicas[index].requests += 1
            try:
                left = any(each.alive and i not in tried for i, each in enumerate(self.replicas))
                last = resent >= MAX_RESENT or not left
                record_of(scope).error = ""  # that of the attempt before
                await self._attempt(upstream, scope, body, send, lambda: replica.first_token(key), last)  # noqa: B023
                return
            except UpstreamError as error:
                log.warning("replica-%d: a request failed: %s", index, error)
                record_of(scope).error = str(error)
                if error.sent and resent >= MAX_RESENT:
                    raise ApiError(502, f"The replica failed: {error}") from error
                resent += error.sent
                self._status.retries += 1
            finally:
                replica.end(key)

    def _choose(self, view: PromptView, generate: bool, tried: set[int]) -> int:
        """Return the index of a living replica that is not in ``tried``. Raise `ApiError` (503) if there is none.

        A request that generates nothing goes to the replica with the fewest requests, and the policy is not asked.
        """
        hidden = [self.replicas[index] for index in tried if self.replicas[index].alive]
        for replica in hidden:
            replica.alive = False
        try:
            if generate:
                return self._policy.choose(view.block_hashes, view.prompt_tokens, self.replicas)
            alive = [index for index, replica in enumerate(self.replicas) if replica.alive]
            if not alive:
                raise NoReplicaError
            return min(alive, key=lambda index: self.replicas[index].requests)
        except NoReplicaError:
            reason = "No replica answers: try again later." if tried else self._status.no_replica
            raise ApiError(503, self._status.stopping or reason, headers={"retry-after": "1"}) from None
        finally:
            for replica in hidden:
                replica.alive = True

    async def _attempt(
        self, upstream: Upstream, scope: Scope, body: Body, send: Send, on_piece: Callable[[], None], last: bool
    ) -> None:
        """Send the request to one replica and pass its response on.

        Raise `UpstreamError` if the replica fails, or refuses with 503 and this is not the ``last`` attempt, before a
        byte was sent to the client. The headers of the response wait for the first piece of its body until then.
        """
        target = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
        headers = _request_headers(scope, len(body.data))
        response = await upstream.request(scope["method"].encode(), target, headers, body.data)
        begun = False
        try:
            if response.status == 503 and not last:
                raise UpstreamError("it refused the request (503)")
            start = _response_start(response)
            async for piece in response.pieces():
                if not begun:
                    body.release()
                    await send(start)
                    begun = True
                on_piece()
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            if not begun:
                await send(start)
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


def is_authorized(headers: Headers, api_key: str | None) -> bool:
    """Return whether a request with these headers has the API key. Each has if ``api_key`` is None."""
    given = headers.get("authorization", "")
    return api_key is None or hmac.compare_digest(given.encode(), f"Bearer {api_key}".encode())


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


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
