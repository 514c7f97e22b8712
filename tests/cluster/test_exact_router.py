"""The exact router adds a replica only if it answers ``/server_info``; else the supervisor counts a failed start."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace

import pytest

from minisgl.cluster.upstream import UpstreamError
from minisgl.plugins.router import exact
from minisgl.plugins.router.exact import ExactRouter

Run = Callable[[Awaitable[None]], None]
HEAD = b"HTTP/1.1 %s\r\ncontent-length: %d\r\n\r\n%s"


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (HEAD % (b"200 OK", 16, b'{"page_size": 4}'), ""),
        (HEAD % (b"503 Busy", 16, b'{"page_size": 4}'), "503"),
        (HEAD % (b"200 OK", 16, b"{"), "within 0.2 s"),
        (b"", "within 0.2 s"),
    ],
)
def test_server_info(run: Run, monkeypatch: pytest.MonkeyPatch, answer: bytes, expected: str) -> None:
    monkeypatch.setattr(exact, "INFO_SECONDS", 0.2 if expected.startswith("within") else 60.0)
    router = ExactRouter.__new__(ExactRouter)  # without the model that it reads prompts for
    router._cluster = SimpleNamespace(server=SimpleNamespace(api_key="key"))  # type: ignore[assignment]
    heads: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(answer)
        await reader.read()
        writer.close()

    async def main() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        if expected:
            with pytest.raises(UpstreamError, match=expected):
                await router._server_info(url)
        else:
            assert await router._server_info(url) == {"page_size": 4}
        assert all(b"authorization: Bearer key" in head for head in heads)
        server.close()

    run(main())
