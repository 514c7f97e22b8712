"""Connections of slow, silent and rude clients: they are bounded and ended, and other clients are served meanwhile."""

from __future__ import annotations

import asyncio
import errno
import json
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from uvicorn.server import ServerState

from minisgl.plugins.http.connections import MAX_HEAD, MAX_HEADERS, MAX_PIPELINED, Connection, Limits
from minisgl.server.serve import listen
from minisgl.testing.serving import Server, patient_timeout

pytestmark = pytest.mark.xdist_group("test_connections")  # one process: the server starts once

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
HEALTH = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
CHUNKED = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n"


@pytest.fixture(scope="module")
def server(tiny: Path) -> Iterator[Server]:
    """Start a server whose clients must send and read within a second."""
    with Server(f"model={tiny}", "num_pages=2048", "server.io_timeout=1", "log_level=warning") as server:
        yield server


@pytest.fixture(scope="module")
def narrow(tiny: Path) -> Iterator[Server]:
    """Start a server with few connections, whose clients may be slow."""
    with Server(f"model={tiny}", "num_pages=2048", "server.max_connections=20", "log_level=warning") as server:
        yield server


def connect(server: Server) -> socket.socket:
    host, _, port = server.url.removeprefix("http://").rpartition(":")
    return socket.create_connection((host, int(port)), timeout=patient_timeout(60))


def read_all(client: socket.socket) -> bytes:
    data = b""
    while piece := client.recv(1 << 16):
        data += piece
    return data


def answer(server: Server, *pieces: bytes) -> bytes:
    """Send ``pieces`` on a connection of their own, and return all that the server sends until it closes it."""
    with connect(server) as client:
        for piece in pieces:
            client.sendall(piece)
        return read_all(client)


def completion(**fields: object) -> bytes:
    """Return the bytes of a request for a completion."""
    body = json.dumps({"prompt": [5, 6], "ignore_eos": True, **fields}).encode()
    return HEAD % len(body) + body


def test_small_writes_are_sent_at_once() -> None:
    """Every accepted connection has TCP_NODELAY: no token waits until the client acknowledges what was sent before."""

    async def accept() -> int:
        accepted = asyncio.get_running_loop().create_future()

        class Accepted(asyncio.Protocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                no_delay = transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
                accepted.set_result(no_delay)

        loop = asyncio.get_running_loop()
        async with await loop.create_server(Accepted, sock=listen("127.0.0.1", 0)) as server:
            _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            no_delay = await accepted
            writer.close()
            return no_delay

    assert asyncio.run(accept())


# ---- too slow ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sent", [b"", b"POST /v1", HEAD % 100, HEAD % 100 + b'{"prompt":'])
def test_slow_request_is_ended(server: Server, sent: bytes) -> None:
    reply = answer(server, sent)
    assert reply.startswith(b"HTTP/1.1 408 ")
    assert json.loads(reply.partition(b"\r\n\r\n")[2])["error"]["message"] == "The request took too long to arrive."
    assert httpx.get(f"{server.url}/health", timeout=30).status_code == 200
    assert server.log() == ""


def test_headers_byte_by_byte_are_ended(server: Server) -> None:
    """A client that sends one byte after the other does not renew the time-out."""
    with connect(server) as client:
        client.settimeout(0.1)
        data = b""
        client.sendall(b"GET /")
        deadline = time.monotonic() + patient_timeout(60)
        while not data and time.monotonic() < deadline:
            try:
                client.sendall(b"x")
                data = client.recv(100)
            except TimeoutError:
                continue
        assert data.startswith(b"HTTP/1.1 408 ")


def test_long_response_is_not_ended(server: Server) -> None:
    """The time-out is no limit of the time in which a request is served, whatever the client sends behind it."""
    for tokens in (1500, 3000, 6000):
        with connect(server) as client:
            client.sendall(completion(max_tokens=tokens) + HEALTH[:20])
            start = time.monotonic()
            data = b""
            while b'"completion_tokens":%d' % tokens not in data:
                piece = client.recv(1 << 16)
                assert piece, data
                data += piece
            served = time.monotonic() - start
            client.sendall(HEALTH[20:])
            assert client.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
        if served > 1:
            break
    else:
        pytest.fail("no response took longer than the time-out")


def test_stream_that_nobody_reads_is_ended(server: Server) -> None:
    """The request of a client that reads nothing is aborted, and its memory is freed."""
    more = {"n": 8, "max_tokens": 8000, "stream": True, "logprobs": 5, "temperature": 1}
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        host, _, port = server.url.removeprefix("http://").rpartition(":")
        client.connect((host, int(port)))
        client.sendall(completion(**more))
        deadline = time.monotonic() + patient_timeout(90)
        while server.metrics()["minisgl_scheduler_finished_abort_total"] < 8 and time.monotonic() < deadline:
            time.sleep(0.2)
        assert server.metrics()["minisgl_scheduler_finished_abort_total"] >= 8
        assert server.wait_until_idle()
    assert "Traceback" not in server.log()


# ---- no HTTP, or too much of it --------------------------------------------------------------------------------

INVALID = {
    "no HTTP": b"\x16\x03\x01\r\n\r\n",
    "a folded header": b"GET /health HTTP/1.1\r\nhost: x\r\na: b\r\n c\r\n\r\n",
    "length and chunks": CHUNKED + b"content-length: 5\r\n\r\n0\r\n\r\n",
    "chunks and length": HEAD[:-4] % 5 + b"\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "two lengths": HEAD[:-4] % 5 + b"\r\ncontent-length: 6\r\n\r\nabcde",
    "a signed length": HEAD.replace(b"%d", b"+5") + b"abcde",
    "chunked twice": CHUNKED + b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "an unknown coding": CHUNKED.replace(b"chunked", b"chunked, identity") + b"\r\n0\r\n\r\n",
    "a space before the colon": CHUNKED.replace(b"encoding:", b"encoding :") + b"\r\n0\r\n\r\n",
    "a line feed alone": HEALTH.replace(b"\r\n", b"\n"),
    "a zero in a header": b"GET /health HTTP/1.1\r\nhost: x\r\na: b\x00c\r\n\r\n",
    "no host": b"GET /health HTTP/1.1\r\n\r\n",
    "two hosts": b"GET /health HTTP/1.1\r\nhost: x\r\nhost: y\r\n\r\n",
    "a chunk without its size": CHUNKED + b"\r\nxyz\r\n",
    "a proxy's request": b"CONNECT x:80 HTTP/1.1\r\nhost: x\r\n\r\n",
    "a target that is none": b"GET health HTTP/1.1\r\nhost: x\r\n\r\n",
}


@pytest.mark.parametrize("sent", INVALID.values(), ids=INVALID.keys())
def test_invalid_http_is_refused(server: Server, sent: bytes) -> None:
    """What proxies may read in two ways is refused, the connection is closed, and nothing is logged."""
    reply = answer(server, sent)
    assert reply.startswith(b"HTTP/1.1 400 ")
    assert reply.count(b"HTTP/1.1") == 1
    assert json.loads(reply.partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"
    assert server.log() == ""


@pytest.mark.parametrize("part", ["target", "one header", "headers of many bytes", "many headers", "trailer"])
def test_large_headers_are_refused(server: Server, part: str) -> None:
    size = MAX_HEAD + (1 << 20)
    sent = {
        "target": b"GET /" + b"x" * size,
        "one header": HEALTH[:-2] + b"a: " + b"b" * size,
        "headers of many bytes": HEALTH[:-2] + b"a: b\r\n" * (size // 6),
        "many headers": HEALTH[:-2] + b"a: b\r\n" * MAX_HEADERS + b"\r\n",
        "trailer": CHUNKED + b"\r\n0\r\na: " + b"b" * size,
    }[part]
    with connect(server) as client:
        try:
            client.sendall(sent)
            reply = read_all(client)
        except ConnectionError:  # the server closed the connection while the client was sending
            return
    assert reply.startswith(b"HTTP/1.1 431 ")


@pytest.mark.parametrize("split", [1, 40, 10_000])
@pytest.mark.parametrize("close", [False, True])
def test_another_protocol_is_ignored(server: Server, split: int, close: bool) -> None:
    """The body of a request that asks for HTTP/2, as Java's and curl's do, is read, and so is the request behind it."""
    sent = completion(max_tokens=3)
    asked = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQ\r\n"
    sent = sent.replace(b"host: x\r\n", b"host: x\r\n" + asked, 1)
    behind = HEALTH.replace(b"host: x", b"host: x\r\nconnection: close")
    sent += HEALTH.replace(b"host: x\r\n", b"host: x\r\n" + asked) + behind
    with connect(server) as client:
        for i in range(0, len(sent), split):
            client.sendall(sent[i : i + split])
        reply = read_all(client)
    assert reply.count(b"HTTP/1.1 200 ") == 3
    assert b'"completion_tokens":3' in reply


def test_pipelined_requests_are_bounded(server: Server) -> None:
    few = answer(server, HEALTH * 8 + HEALTH.replace(b"host: x", b"host: x\r\nconnection: close"))
    assert few.count(b"HTTP/1.1 200 ") == 9
    many = b""
    with connect(server) as client:
        client.sendall(HEALTH * (MAX_PIPELINED + 100))
        with suppress(ConnectionError):
            many = read_all(client)
    assert many.count(b"HTTP/1.1 200 ") <= MAX_PIPELINED + 1


# ---- too many --------------------------------------------------------------------------------------------------


def test_silent_connections_make_room(narrow: Server) -> None:
    """Connections that wait for a request never keep a new client out: the one that waited longest is closed."""
    with ExitStack() as stack:
        silent = [stack.enter_context(connect(narrow)) for _ in range(300)]
        assert httpx.get(f"{narrow.url}/health", timeout=30).status_code == 200
        with suppress(ConnectionError):
            assert silent[0].recv(100) == b""
        silent[-1].sendall(HEALTH)
        assert silent[-1].recv(100).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("begun", [b"", b"{" * 100, b"GET /"])
def test_half_bodies_make_room(narrow: Server, begun: bytes) -> None:
    """Connections that wait for a body keep no new client out: the one that waited longest is closed."""
    with ExitStack() as stack:
        half = [stack.enter_context(connect(narrow)) for _ in range(60)]
        for client in half:
            with suppress(ConnectionError):
                client.sendall(HEAD % 1000 + begun)
        assert httpx.get(f"{narrow.url}/health", timeout=30).status_code == 200
        assert (
            answer(narrow, completion(max_tokens=1).replace(b"host: x", b"host: x\r\nconnection: close"))[9:12]
            == b"200"
        )
        with suppress(ConnectionError):
            assert half[0].recv(100) == b""
        body = b'{"prompt": [5], "max_tokens": 1}'.ljust(1000 - len(begun))
        if not begun:
            half[-1].sendall(body)
            assert half[-1].recv(100).startswith(b"HTTP/1.1 200 ")


def test_responses_do_not_make_room(narrow: Server) -> None:
    """A connection whose response is under way is never closed for a new one, also while it sends another request."""
    with ExitStack() as stack:
        busy = stack.enter_context(connect(narrow))
        busy.sendall(completion(max_tokens=2000, stream=True) + HEAD % 1000 + b"{")
        assert busy.recv(100).startswith(b"HTTP/1.1 200 ")
        for _ in range(60):
            stack.enter_context(connect(narrow)).sendall(HEAD % 1000 + b"{")
        data = b""
        while b"[DONE]" not in data:
            piece = busy.recv(1 << 16)
            assert piece
            data = data[-100:] + piece


def test_connections_above_the_limit_are_refused(narrow: Server) -> None:
    """While every connection is busy, a new one gets 503 with Retry-After, and is served as soon as one ends."""
    with ExitStack() as stack:
        busy = [stack.enter_context(connect(narrow)) for _ in range(20)]
        for client in busy:
            client.sendall(completion(max_tokens=8000, stream=True))
        for client in busy:
            assert client.recv(100).startswith(b"HTTP/1.1 200 ")
        for path in (b"/health", b"/ready", b"/health?x"):  # probes are answered, and their connections closed
            assert answer(narrow, HEALTH.replace(b"/health", path)).startswith(b"HTTP/1.1 200 ")
        for sent in (b"", HEALTH[:20], completion(max_tokens=1), HEALTH.replace(b"/health", b"/v1/models"), b"\0\0"):
            reply = answer(narrow, sent)
            assert reply.startswith(b"HTTP/1.1 503 ")
            assert b"\r\nretry-after: 1\r\n" in reply
            assert json.loads(reply.partition(b"\r\n\r\n")[2])["error"]["type"] == "server_error"
    deadline = time.monotonic() + patient_timeout(60)
    models = HEALTH.replace(b"/health", b"/v1/models").replace(b"host: x", b"host: x\r\nconnection: close")
    while answer(narrow, models).startswith(b"HTTP/1.1 503 "):
        assert time.monotonic() < deadline
    assert narrow.log().count("\n") <= 7
    assert "Traceback" not in narrow.log()


LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[2])))
from minisgl.plugins.http.connections import limits_for
print(*limits_for(int(sys.argv[3])), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


@pytest.mark.parametrize(
    ("soft", "hard", "wanted", "now"),
    [(256, 512, 8192, 512), (512, 4096, 8192, 4096), (4096, 4096, 100, 4096), (256, 4096, 100, 740)],
)
def test_soft_limit_is_raised(soft: int, hard: int, wanted: int, now: int) -> None:
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if most != resource.RLIM_INFINITY and most < hard:
        pytest.skip("the hard limit of this machine is lower")
    ran = subprocess.run(
        [sys.executable, "-c", LIMITED, str(soft), str(hard), str(wanted)], capture_output=True, text=True, check=True
    )
    connections, refused, limit = map(int, ran.stdout.split())
    assert limit == now
    assert connections + refused < limit
    assert connections == wanted or connections > hard // 4


# ---- many at once -----------------------------------------------------------------------------------------------


class _Transport(asyncio.Transport):
    """A transport without a socket. ``unsent`` is the number of bytes in its buffer."""

    unsent = 0
    aborted = False

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def can_write_eof(self) -> bool:
        return False

    def abort(self) -> None:
        self.aborted = True

    def write(self, data: bytes | bytearray | memoryview) -> None:
        pass

    def is_closing(self) -> bool:
        return False

    def close(self) -> None:
        pass


def test_a_burst_is_handled_in_parts() -> None:
    """A turn of the event loop begins to handle few requests, and those for ``/health`` at once."""

    async def test() -> None:
        handled: list[str] = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            handled.append(scope["path"])
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b""})

        kind = Connection.limited(Limits(1000, 10), 30.0)
        config = uvicorn.Config(app, http=kind, ws="none", lifespan="off", log_config=None)
        sent = [HEALTH.replace(b"health", b"v1")] * 100 + [HEALTH]
        connections = [kind(config, ServerState(), {}) for _ in sent]
        for connection, data in zip(connections, sent, strict=True):
            connection.connection_made(_Transport())
            connection.data_received(data)
        turns = [0]
        while len(handled) < len(sent):
            await asyncio.sleep(0)
            turns.append(len(handled))
        assert "/health" in handled[:10]
        assert max(b - a for a, b in pairwise(turns)) <= 10
        for connection in connections:
            connection.connection_lost(None)

    asyncio.run(test())


async def _no_application(scope: Any, receive: Any, send: Any) -> None:
    raise AssertionError("no request was sent")


def test_connection_with_an_unsent_response_is_not_closed() -> None:
    """The connection that makes room for a new one is the longest waiting one whose response has been sent."""

    async def test() -> None:
        kind = Connection.limited(Limits(2, 10), 30.0)
        config = uvicorn.Config(_no_application, http=kind, ws="none", lifespan="off", log_config=None)
        state = ServerState()
        transports = [_Transport() for _ in range(4)]
        transports[0].unsent = 5
        connections = [kind(config, state, {}) for _ in transports]
        for connection, transport in zip(connections[:3], transports, strict=False):
            connection.connection_made(transport)
        assert [transport.aborted for transport in transports] == [False, True, False, False]
        transports[2].unsent = 5
        connections[3].connection_made(transports[3])
        assert [transport.aborted for transport in transports] == [False, True, False, False]
        assert len(state.connections) == 2
        for connection in connections:
            connection._stop_timer()

    asyncio.run(test())


def test_time_out_of_a_client_that_has_gone() -> None:
    """A client may reset its connection at the very moment of its time-out: that is no error."""

    class Gone(_Transport):
        def can_write_eof(self) -> bool:
            return True

        def write_eof(self) -> None:
            raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")

    async def test() -> None:
        kind = Connection.limited(Limits(2, 10), 0.0)
        config = uvicorn.Config(_no_application, http=kind, ws="none", lifespan="off", log_config=None)
        errors: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
        connection = kind(config, ServerState(), {})
        connection.connection_made(Gone())
        await asyncio.sleep(0.01)
        assert connection._ended
        assert errors == []
        connection.connection_lost(None)

    asyncio.run(test())
