"""Bytes of HTTP requests, and connections that send them: whole, in part, slowly, or without reading the response."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, NamedTuple

from minisgl.plugins.http import HttpConfig

UNANSWERED = "no answer"
"""What `Target.send` returns for a connection that ended without a response."""


class Target(NamedTuple):
    """The server that is abused.

    ``max_model_len`` is the largest number of tokens of a request. ``deadline`` is the time on the clock of
    ``time.monotonic`` after which no abuse begins anything new. ``folder`` holds the server's sockets, or is None if
    the server is not the benchmark's own.
    """

    host: str
    port: int
    max_model_len: int
    deadline: float
    folder: str | None = None

    @property
    def largest_body(self) -> int:
        """The largest body in bytes that the server accepts by default."""
        return HttpConfig().body_limit(self.max_model_len)

    @property
    def seconds_left(self) -> float:
        """Seconds until the deadline, at least 0."""
        return max(0.0, self.deadline - time.monotonic())

    async def connect(self, receive_buffer: int | None = None) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Return a new connection. ``receive_buffer`` is the size of the client's socket buffer in bytes."""
        if receive_buffer is None:
            return await asyncio.open_connection(self.host, self.port)
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        client.setblocking(False)
        await asyncio.get_running_loop().sock_connect(client, (self.host, self.port))
        return await asyncio.open_connection(sock=client, limit=1024)

    async def send(self, data: bytes) -> str:
        """Send ``data`` on a new connection. Return the status of the response, or `UNANSWERED`."""
        writer = None
        try:
            reader, writer = await self.connect()
            writer.write(data)
            line = await reader.readline()  # the server may answer before it has read everything
            return line.split()[1].decode() if line.startswith(b"HTTP/1.1 ") else UNANSWERED
        except (OSError, asyncio.LimitOverrunError):
            return UNANSWERED
        finally:
            if writer is not None:
                writer.transport.abort()

    async def send_and_stay(self, data: bytes) -> str:
        """Send ``data`` on a new connection, and read the response to its end. Return its status, or `UNANSWERED`."""
        writer = None
        try:
            reader, writer = await self.connect()
            writer.write(data)
            line = await reader.readline()
            while await reader.read(2**16):
                pass
            return line.split()[1].decode() if line.startswith(b"HTTP/1.1 ") else UNANSWERED
        except (OSError, asyncio.LimitOverrunError):
            return UNANSWERED
        finally:
            if writer is not None:
                writer.transport.abort()


def post(path: str, body: dict[str, Any] | bytes) -> bytes:
    """Return the bytes of a POST request."""
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
    return f"{head}connection: close\r\n\r\n".encode() + body


def completion(**fields: Any) -> bytes:
    """Return the bytes of a request for a completion."""
    return post("/v1/completions", fields)


async def repeat(target: Target, requests: Iterable[bytes], parallel: int) -> Counter[str]:
    """Send the requests, ``parallel`` at a time, until they are sent or the deadline has come. Count the statuses.

    At least ``parallel`` requests are sent.
    """
    seen: Counter[str] = Counter()
    left = iter(requests)

    async def client() -> None:
        for request in left:
            seen[await target.send(request)] += 1
            if not target.seconds_left:
                return

    await asyncio.gather(*(client() for _ in range(parallel)))
    return seen


async def hold(target: Target, number: int, act: Callable[[int], Awaitable[str]]) -> Counter[str]:
    """Run ``act(i)`` for ``number`` clients at once, and end those that have not ended at the deadline."""
    tasks = [asyncio.ensure_future(act(i)) for i in range(number)]
    done, pending = await asyncio.wait(tasks, timeout=target.seconds_left)
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)
    seen = Counter(task.result() if task.exception() is None else UNANSWERED for task in done)
    return seen + Counter({"still open": len(pending)})
