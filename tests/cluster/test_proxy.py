"""The proxy: requests and responses are passed on unchanged, and a request whose replica fails goes to another one."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import httpx
import pytest
from starlette.types import ASGIApp

from minisgl.cluster import relay
from minisgl.cluster.http_server import HttpServer
from minisgl.cluster.proxy import Proxy
from minisgl.cluster.relay import PromptView
from minisgl.cluster.routing import Replica, live_replicas
from minisgl.cluster.status import ClusterStatus, ReplicaStatus
from minisgl.cluster.upstream import UpstreamError
from minisgl.plugins.http import HttpConfig
from minisgl.plugins.http.records import Records
from minisgl.server.app import wrapped
from minisgl.server.extension import HttpExtension
from minisgl.server.request_record import RequestRecord
from minisgl.server.serve import listen

Run = Callable[[Awaitable[None]], None]
Until = Callable[..., Awaitable[None]]
CHAT = "/v1/chat/completions"
OK = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: 2\r\nx-request-id: theirs\r\n\r\nok"
EVENTS = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
BUSY = b"HTTP/1.1 503 Busy\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class Upstream:
    """A server in this process. It answers each request as ``answer(writer)`` does, by default with `OK`."""

    def __init__(self) -> None:
        self.requests: list[tuple[bytes, dict[bytes, bytes], bytes]] = []  # the first line, the headers, the body
        self.connections = self.closed = 0
        self.answer: Callable[[asyncio.StreamWriter], Awaitable[None]] = self.ok

    async def ok(self, writer: asyncio.StreamWriter) -> None:
        writer.write(OK)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                line, *lines = (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")
                headers = dict(each.split(b": ", 1) for each in lines if each)
                body = await reader.readexactly(int(headers.get(b"content-length", 0)))
                self.requests.append((line, headers, body))
                answer = asyncio.ensure_future(self.answer(writer))
                gone = asyncio.ensure_future(reader.read(1)) if self.answer == self.wait else None
                await asyncio.wait({answer, gone} if gone else {answer}, return_when=asyncio.FIRST_COMPLETED)
                if gone is not None:
                    answer.cancel()
                    break
                answer.result()
        self.closed += 1
        writer.close()

    async def wait(self, writer: asyncio.StreamWriter) -> None:
        """Answer nothing until the client disconnects."""
        await asyncio.sleep(60)


class InTurn:
    """A policy: the living replicas in turn. It records what it is told."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[int], int]] = []

    def choose(self, block_hashes: Sequence[int], prompt_tokens: int, replicas: Sequence[Replica]) -> int:
        self.calls.append((list(block_hashes), prompt_tokens))
        live = live_replicas(replicas)
        return live[(len(self.calls) - 1) % len(live)]


class Cluster:
    """A proxy with ``count`` servers in this process, and a client. ``records`` are those of its requests."""

    def __init__(self, count: int, max_body: int, **options: Any) -> None:
        self.records: list[RequestRecord] = []
        self.status = ClusterStatus([ReplicaStatus(index, "ready") for index in range(count)])
        self.policy = InTurn()
        self.upstreams = [Upstream() for _ in range(count)]

        async def read_prompt(path: str, headers: Any, body: bytes) -> PromptView:
            return PromptView([len(path)], len(body), 7)

        self.proxy = Proxy(self.policy, self.status, read_prompt, max_body, **options)

    @contextlib.asynccontextmanager
    async def serve(self) -> AsyncIterator[Cluster]:
        servers = []
        for index, upstream in enumerate(self.upstreams):
            server = await asyncio.start_server(upstream.serve, "127.0.0.1", 0)
            servers.append(server)
            self.proxy.connect(index, *server.sockets[0].getsockname(), 16)
        options = HttpConfig(max_connections=100)
        http = HttpServer(self.observed(), listen("127.0.0.1", 0), options)
        await http.start()
        try:
            async with httpx.AsyncClient(base_url=http.url, timeout=30) as self.client:
                yield self
        finally:
            await http.close()
            for server in servers:
                server.close()

    def observed(self) -> ASGIApp:
        """Return the proxy, which adds the records of its requests to ``records``."""
        observer = HttpExtension()
        observer.on_end = self.records.append  # type: ignore[method-assign]
        return wrapped(self.proxy, [observer, Records()])

    async def post(self, body: object = None, path: str = CHAT, **more: Any) -> httpx.Response:
        return await self.client.post(path, content=json.dumps(body or {}), **more)


@pytest.fixture
def proxied(run: Run) -> Callable[..., None]:
    """Return a function that runs a coroutine function with a `Cluster` of ``count`` servers."""

    def start(
        body: Callable[[Cluster], Awaitable[None]], count: int = 2, max_body: int = 10_000, **options: Any
    ) -> None:
        async def main() -> None:
            async with Cluster(count, max_body, **options).serve() as cluster:
                await body(cluster)

        run(main())

    return start


def test_a_request_and_its_response_are_passed_on_unchanged(proxied: Callable[..., None]) -> None:
    async def body(cluster: Cluster) -> None:
        sent = {"prompt": "ä\u0000", "x": 1}
        headers = {"X-Request-Id": "mine", "Authorization": "Bearer k", "Connection": "x-hop, keep-alive", "X-Hop": "1"}
        headers["X-Forwarded-For"] = "6.6.6.6"
        answer = await cluster.post(sent, CHAT + "?a=%2F&b", headers=headers)
        assert (answer.status_code, answer.text) == (200, "ok")
        assert answer.headers.get_list("x-request-id") == ["mine"]
        assert answer.headers["content-type"] == "text/plain"
        [(line, got, content)] = cluster.upstreams[0].requests
        assert line == b"POST /v1/chat/completions?a=%2F&b HTTP/1.1"
        assert content == json.dumps(sent).encode()
        assert (got[b"x-request-id"], got[b"authorization"]) == (b"mine", b"Bearer k")
        assert b"x-hop" not in got and b"connection" not in got
        assert got[b"x-forwarded-for"] == b"6.6.6.6"  # this client is a trusted proxy: it connects from 127.0.0.1
        assert cluster.policy.calls == [([len(CHAT)], len(content))]
        assert [each.requests for each in cluster.status.replicas] == [1, 0]
        assert cluster.proxy.replicas[0].requests == 0

    proxied(body)


def test_other_requests_ask_no_policy(proxied: Callable[..., None]) -> None:
    async def body(cluster: Cluster) -> None:
        assert (await cluster.client.get("/v1/models")).text == "ok"
        assert (await cluster.client.head("/v1/models")).headers["content-length"] == "2"
        assert (await cluster.post(path="/tokenize")).text == "ok"
        assert cluster.policy.calls == []
        assert sum(len(each.requests) for each in cluster.upstreams) == 3

    proxied(body)


def test_connections_are_used_again(proxied: Callable[..., None]) -> None:
    async def body(cluster: Cluster) -> None:
        for _ in range(4):
            await cluster.post()
        assert cluster.upstreams[0].connections == 1
        assert len(cluster.upstreams[0].requests) == 4

    proxied(body, count=1)


def test_an_idle_connection_that_was_closed(proxied: Callable[..., None]) -> None:
    """The request is sent again on a new connection: the server has not answered on the old one."""

    async def body(cluster: Cluster) -> None:
        upstream = cluster.upstreams[0]
        await cluster.post()

        async def close_first(writer: asyncio.StreamWriter) -> None:
            upstream.answer = upstream.ok
            raise ConnectionError

        upstream.answer = close_first
        assert (await cluster.post()).text == "ok"
        assert upstream.connections == 2
        assert cluster.proxy.retries == 0

    proxied(body, count=1)


def test_pieces_arrive_as_they_are_sent(proxied: Callable[..., None]) -> None:
    async def body(cluster: Cluster) -> None:
        go = asyncio.Event()
        replica = cluster.proxy.replicas[0]

        async def stream(writer: asyncio.StreamWriter) -> None:
            writer.write(EVENTS + chunk(b"data: 1\n\n"))
            await go.wait()
            writer.write(chunk(b"data: 2\n\n") + b"0\r\n\r\n")

        cluster.upstreams[0].answer = stream
        async with cluster.client.stream("POST", CHAT, content=b"{}") as answer:
            pieces = answer.aiter_raw()
            assert await anext(pieces) == b"data: 1\n\n"
            assert (replica.requests, replica.waiting_tokens, replica.output_tokens) == (1, 0, 7)
            go.set()
            assert await anext(pieces) == b"data: 2\n\n"
            assert [piece async for piece in pieces] == []
        assert replica.requests == 0

    proxied(body, count=1)


def test_a_client_that_disconnects_aborts_its_request(proxied: Callable[..., None], until: Until) -> None:
    async def body(cluster: Cluster) -> None:
        upstream = cluster.upstreams[0]
        upstream.answer = upstream.wait
        request = asyncio.create_task(cluster.post())
        await until(lambda: upstream.requests)
        assert cluster.proxy.replicas[0].requests == 1
        request.cancel()
        await until(lambda: upstream.closed == 1)
        await until(lambda: cluster.proxy.replicas[0].requests == 0)
        assert await cluster.proxy.wait_until_idle(10)

    proxied(body, count=1)


def test_a_request_that_is_cancelled(proxied: Callable[..., None], until: Until) -> None:
    """An HTTP server may cancel the application at the disconnect, as Ray Serve does. It counts as a disconnect."""

    async def body(cluster: Cluster) -> None:
        upstream = cluster.upstreams[0]
        upstream.answer = upstream.wait
        scope = {"type": "http", "method": "POST", "path": CHAT, "raw_path": CHAT.encode(), "query_string": b""}
        scope |= {"headers": [], "scheme": "http", "client": None}
        messages = iter([{"type": "http.request", "body": b"{}", "more_body": False}])

        async def receive() -> Any:
            return next(messages, None) or await asyncio.Future()

        request = asyncio.create_task(cluster.observed()(scope, receive, receive))
        await until(lambda: upstream.requests)
        request.cancel()
        await asyncio.wait({request})
        assert request.cancelled()
        assert [record.status for record in cluster.records] == [499]
        await until(lambda: upstream.closed == 1)
        assert cluster.proxy.replicas[0].requests == 0

    proxied(body, count=1)


async def die(writer: asyncio.StreamWriter) -> None:
    raise ConnectionError


async def die_after_headers(writer: asyncio.StreamWriter) -> None:
    writer.write(EVENTS)
    await writer.drain()
    raise ConnectionError


@pytest.mark.parametrize("answer", [die, die_after_headers])
def test_a_request_whose_replica_dies_goes_to_another(proxied: Callable[..., None], answer: Any) -> None:
    async def body(cluster: Cluster) -> None:
        cluster.upstreams[0].answer = answer
        assert (await cluster.post()).text == "ok"
        assert [len(each.requests) for each in cluster.upstreams] == [1, 1]
        assert cluster.proxy.retries == 1
        assert [each.requests for each in cluster.proxy.replicas] == [0, 0]

    proxied(body)


def test_a_request_that_kills_replicas_does_not_reach_all(proxied: Callable[..., None]) -> None:
    async def body(cluster: Cluster) -> None:
        for upstream in cluster.upstreams:
            upstream.answer = die
        answer = await cluster.post()
        assert answer.status_code == 502
        assert "closed the connection" in answer.json()["error"]["message"]
        assert sum(len(each.requests) for each in cluster.upstreams) == 2

    proxied(body, count=4)


def test_a_stream_that_breaks_off_ends_with_an_error(proxied: Callable[..., None]) -> None:
    async def body(cluster: Cluster) -> None:
        async def break_off(writer: asyncio.StreamWriter) -> None:
            writer.write(EVENTS + chunk(b"data: 1\n\n"))
            await writer.drain()
            raise ConnectionError

        cluster.upstreams[0].answer = break_off
        answer = await cluster.post()
        first, last = answer.text.split()[1], answer.text.rstrip().rpartition("data: ")[2]
        assert first == "1"
        assert json.loads(last)["error"]["message"] == "The replica died before the response was complete."
        assert len(cluster.upstreams[1].requests) == 0

    proxied(body)


def test_another_response_that_breaks_off_is_incomplete(proxied: Callable[..., None]) -> None:
    async def body(cluster: Cluster) -> None:
        async def break_off(writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nhalf")
            await writer.drain()
            raise ConnectionError

        cluster.upstreams[0].answer = break_off
        with pytest.raises(httpx.RemoteProtocolError):
            await cluster.post()

    proxied(body)


def test_a_busy_replica(proxied: Callable[..., None]) -> None:
    """A request that is refused with 503 goes to another replica. The refusal of the last one is passed on."""

    async def body(cluster: Cluster) -> None:
        async def busy(writer: asyncio.StreamWriter) -> None:
            writer.write(BUSY)

        cluster.upstreams[0].answer = busy
        assert (await cluster.post()).text == "ok"
        cluster.upstreams[1].answer = busy
        answer = await cluster.post()
        assert (answer.status_code, answer.text) == (503, "{}")

    proxied(body)


def test_an_idle_replica_after_one_that_is_gone_and_a_busy_one(proxied: Callable[..., None], until: Until) -> None:
    """A replica that was removed is not counted as one that is left. The attempts before leave no error behind."""

    async def body(cluster: Cluster) -> None:
        async def busy(writer: asyncio.StreamWriter) -> None:
            writer.write(BUSY)

        async def refuse(*request: Any) -> Any:
            cluster.proxy.disconnect(0)
            raise UpstreamError("refused", sent=False)

        first = cluster.proxy._upstreams[0]
        assert first is not None
        first.request = refuse  # type: ignore[method-assign]
        cluster.upstreams[2].answer = busy  # the policy takes it second
        assert (await cluster.post()).text == "ok"
        assert [len(each.requests) for each in cluster.upstreams] == [0, 1, 1]
        assert cluster.proxy.retries == 2
        await until(lambda: cluster.records)
        assert [(record.status, record.error) for record in cluster.records] == [(200, "")]

    proxied(body, count=3)


def test_several_connection_headers(proxied: Callable[..., None]) -> None:
    async def body(cluster: Cluster) -> None:
        async def answer(writer: asyncio.StreamWriter) -> None:
            named = b"\r\nconnection: x-one\r\nx-one: 1\r\nconnection: keep-alive\r\n"
            writer.write(OK.replace(b"\r\n", named, 1))

        cluster.upstreams[0].answer = answer
        headers = [("Connection", "x-hop"), ("Connection", "keep-alive"), ("X-Hop", "1"), ("X-End", "2")]
        got = await cluster.post(headers=headers)
        assert got.text == "ok" and "x-one" not in got.headers
        [(_, sent, _)] = cluster.upstreams[0].requests
        assert b"x-hop" not in sent and sent[b"x-end"] == b"2"

    proxied(body, count=1)


@pytest.mark.parametrize("header", ["", "Authorization: Bearer other\r\n"])
def test_no_body_is_read_without_the_api_key(proxied: Callable[..., None], header: str) -> None:
    """The replica refuses the request: it gets the headers, and the router does not wait for the body."""

    async def body(cluster: Cluster) -> None:
        async def refuse(writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 401 Unauthorized\r\ncontent-length: 2\r\n\r\n{}")

        cluster.upstreams[0].answer = refuse
        reader, writer = await asyncio.open_connection("127.0.0.1", cluster.client.base_url.port)
        writer.write(f"POST {CHAT} HTTP/1.1\r\nhost: x\r\n{header}content-length: 1000000000\r\n\r\n{{".encode())
        assert (await reader.readline()).startswith(b"HTTP/1.1 401 ")
        writer.close()
        [(_, headers, content)] = cluster.upstreams[0].requests
        assert (headers[b"content-length"], content) == (b"0", b"")
        assert headers.get(b"authorization") == (b"Bearer other" if header else None)

        cluster.upstreams[0].answer = cluster.upstreams[0].ok
        assert (await cluster.post({"x": 1}, headers={"Authorization": "Bearer key"})).text == "ok"
        assert json.loads(cluster.upstreams[0].requests[1][2]) == {"x": 1}

    proxied(body, count=1, api_key="key")


def test_request_timeout(proxied: Callable[..., None], until: Until) -> None:
    async def body(cluster: Cluster) -> None:
        upstream = cluster.upstreams[0]
        upstream.answer = upstream.wait
        answer = await cluster.post()
        message = "The request took longer than 0.2 s (server.request_timeout)."
        assert (answer.status_code, answer.json()["error"]["message"]) == (504, message)
        await until(lambda: cluster.records and upstream.closed == upstream.connections)
        assert [(record.status, record.error) for record in cluster.records] == [(504, message)]
        assert cluster.proxy.replicas[0].requests == 0

        reader, writer = await asyncio.open_connection("127.0.0.1", cluster.client.base_url.port)
        writer.write(f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n{{".encode())
        assert (await reader.readline()).startswith(b"HTTP/1.1 504 ")
        writer.close()

    proxied(body, count=1, request_timeout=0.2)


def test_a_stream_that_has_begun_is_ended_by_the_replica(proxied: Callable[..., None]) -> None:
    async def body(cluster: Cluster) -> None:
        async def stream(writer: asyncio.StreamWriter) -> None:
            writer.write(EVENTS + chunk(b"data: 1\n\n"))
            await asyncio.sleep(2.5)
            writer.write(chunk(b"data: 2\n\n") + b"0\r\n\r\n")

        cluster.upstreams[0].answer = stream
        answer = await cluster.post()
        assert (answer.status_code, answer.text) == (200, "data: 1\n\ndata: 2\n\n")

    proxied(body, count=1, request_timeout=2.0)


def test_no_replica(proxied: Callable[..., None]) -> None:
    async def body(cluster: Cluster) -> None:
        cluster.proxy.disconnect(0)
        answer = await cluster.post()
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert answer.json()["error"]["message"] == "No replica is ready: try again later."
        cluster.status.replicas[0].state = "waiting"
        assert (await cluster.client.get("/health")).status_code == 503
        cluster.status.replicas[0].state = "ready"
        cluster.status.stopping = "The server is shutting down."
        for answer in (await cluster.post(), await cluster.client.get("/ready")):
            assert (answer.status_code, answer.json()["error"]["message"]) == (503, "The server is shutting down.")

    proxied(body, count=1)


def test_a_replica_that_is_removed_breaks_its_requests_off(proxied: Callable[..., None], until: Until) -> None:
    """They go to another replica, which is not the same one after a restart."""

    async def body(cluster: Cluster) -> None:
        upstream = cluster.upstreams[0]
        upstream.answer = upstream.wait
        request = asyncio.create_task(cluster.post())
        await until(lambda: upstream.requests)
        cluster.proxy.disconnect(0)
        assert (await request).text == "ok"
        assert not cluster.proxy.replicas[0].alive

    proxied(body)


def test_a_body_that_is_too_large(proxied: Callable[..., None]) -> None:
    async def body(cluster: Cluster) -> None:
        answer = await cluster.post({"prompt": "x" * 10_000})
        assert answer.status_code == 413
        assert cluster.upstreams[0].requests == []

    proxied(body, count=1)


def test_the_bodies_of_all_requests_have_a_bound(
    proxied: Callable[..., None], until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A body counts as it arrives, until its response begins: then the request is not sent again."""
    monkeypatch.setattr(relay, "MAX_BUFFERED", 10_000)

    async def body(cluster: Cluster) -> None:
        upstream, buffer = cluster.upstreams[0], cluster.proxy._buffer
        go = asyncio.Event()

        async def stream(writer: asyncio.StreamWriter) -> None:
            writer.write(EVENTS + chunk(b"data: 1\n\n"))
            await go.wait()
            writer.write(b"0\r\n\r\n")

        upstream.answer = stream
        async with cluster.client.stream("POST", CHAT, content=b"x" * 6_000) as answer:
            pieces = answer.aiter_raw()
            assert await anext(pieces) == b"data: 1\n\n"
            assert buffer.size == 0
            upstream.answer = upstream.wait
            waiting = asyncio.create_task(cluster.client.post(CHAT, content=b"x" * 6_000))
            await until(lambda: len(upstream.requests) == 2)
            assert buffer.size == 6_000
            refused = await cluster.client.post(CHAT, content=b"x" * 6_000)
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            assert "too many bytes" in refused.json()["error"]["message"]
            assert len(upstream.requests) == 2 and buffer.size == 6_000
            waiting.cancel()
            await until(lambda: buffer.size == 0)
            upstream.answer = upstream.ok
            assert (await cluster.client.post(CHAT, content=b"x" * 10_000)).text == "ok"  # a body that fits alone
            go.set()
            assert [piece async for piece in pieces] == []
        assert buffer.size == 0

    proxied(body, count=1)


def test_a_slow_client_stops_the_reading(proxied: Callable[..., None]) -> None:
    """What a client does not read stays in the server, and does not fill the router's memory."""

    async def body(cluster: Cluster) -> None:
        written = 0
        size = 2**16

        async def flood(writer: asyncio.StreamWriter) -> None:
            nonlocal written
            writer.write(EVENTS)
            while written < 2000:
                writer.write(chunk(b"x" * size))
                await writer.drain()
                written += 1

        cluster.upstreams[0].answer = flood
        port = cluster.client.base_url.port
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**16)
        writer.write(f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{{}}".encode())
        await reader.readuntil(b"\r\n\r\n")
        before = -1
        while written != before:  # until nothing moves any more
            before = written
            await asyncio.sleep(0.5)
        assert written < 1000
        writer.close()

    proxied(body, count=1)


def test_status(proxied: Callable[..., None]) -> None:
    async def body(cluster: Cluster) -> None:
        await cluster.post()
        cluster.proxy.replicas[0].blocks.update({1, 2, 3})
        assert (await cluster.client.get("/health")).json() == {"status": "ok", "ready": 2, "replicas": 2}
        assert (await cluster.client.get("/ready")).json()["status"] == "ready"
        found = (await cluster.client.get("/replicas")).json()["replicas"]
        assert [(each["requests"], each["open_requests"], each["cached_blocks"]) for each in found] == [
            (1, 0, 3),
            (0, 0, 0),
        ]
        text = (await cluster.client.get("/metrics")).text
        assert 'minisgl_cluster_up{replica="1"} 1' in text
        assert 'minisgl_cluster_requests_total{replica="0"} 1' in text

    proxied(body)
