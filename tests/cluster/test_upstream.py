"""The HTTP client of a router: what happens to a connection between two requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from minisgl.cluster.upstream import Response, Upstream, UpstreamError

Answer = Callable[[bytes, asyncio.StreamWriter], None]


def respond(text: bytes, writer: asyncio.StreamWriter) -> None:
    """Answer a request for a path with this path, head and body in one packet."""
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(text), text))


def get(upstream: Upstream, path: bytes) -> asyncio.Task[Response]:
    return asyncio.ensure_future(upstream.request(b"GET", path, [(b"host", b"x")], b""))


class Server:
    """A server on a free port. ``answer`` answers each request."""

    def __init__(self, answer: Answer = respond):
        self.answer, self.connections, self.requests = answer, 0, 0

    async def __aenter__(self) -> Server:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.upstream = Upstream(*self._server.sockets[0].getsockname())
        return self

    async def __aexit__(self, *error: object) -> None:
        self.upstream.close()
        self.refuse()

    def refuse(self) -> None:
        """Accept no more connections."""
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                self.requests += 1
                self.answer(head.split(b" ")[1], writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


def test_a_connection_is_used_again() -> None:
    async def body() -> None:
        async with Server() as server:
            for path in (b"/one", b"/two"):
                response = await get(server.upstream, path)
                assert await response.body() == path
                response.close()
            assert server.connections == 1

    asyncio.run(body())


@pytest.mark.parametrize("size", [10, 400_000])
def test_what_was_not_read_is_not_part_of_the_next_response(size: int) -> None:
    """The response is complete, but its reader has gone: the connection must not carry another request."""

    def answer(path: bytes, writer: asyncio.StreamWriter) -> None:
        respond(b"a" * size if path == b"/first" else path, writer)

    async def body() -> None:
        async with Server(answer) as server:
            first = await get(server.upstream, b"/first")
            await asyncio.sleep(0.2)  # its body arrives, and is not read
            first.close()
            async with asyncio.timeout(150):
                assert await (await get(server.upstream, b"/second")).body() == b"/second"

    asyncio.run(body())


def test_a_server_that_ends_on_a_reused_connection() -> None:
    """It may have seen the request. So the error says that the request was sent, although no new connection opens."""

    def answer(path: bytes, writer: asyncio.StreamWriter) -> None:
        if path == b"/last":
            server.refuse()
            writer.transport.abort()
        else:
            respond(path, writer)

    async def body() -> None:
        nonlocal server
        async with Server(answer) as server:
            response = await get(server.upstream, b"/first")
            await response.body()
            response.close()
            with pytest.raises(UpstreamError) as caught:
                await get(server.upstream, b"/last")
            assert caught.value.sent
            with pytest.raises(UpstreamError) as caught:
                await get(server.upstream, b"/later")
            assert not caught.value.sent

    server = Server()
    asyncio.run(body())


def test_a_closed_client_does_not_connect_again() -> None:
    def answer(path: bytes, writer: asyncio.StreamWriter) -> None:
        if path != b"/hangs":
            respond(path, writer)

    async def body() -> None:
        async with Server(answer) as server:
            response = await get(server.upstream, b"/first")
            await response.body()
            response.close()
            waiting = get(server.upstream, b"/hangs")
            while server.requests < 2:
                await asyncio.sleep(0.01)
            server.upstream.close()
            with pytest.raises(UpstreamError):
                await waiting
            assert (server.connections, server.requests) == (1, 2)

    asyncio.run(body())
