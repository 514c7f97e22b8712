"""Clients that disconnect: their requests are aborted, their pages are freed, and other requests are not affected."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from minisgl.testing.serving import Server

pytestmark = pytest.mark.xdist_group("test_hangups")  # one process: the server starts once

PATH = "/v1/chat/completions"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """Start a server with a small KV pool and two tokenizer processes, so that requests wait and are retracted."""
    with Server(
        "model=tutor", "num_pages=160", "max_prefill_tokens=64", "server.tokenizers=2", "log_level=warning"
    ) as server:
        yield server


def staying_request(i: int) -> dict[str, Any]:
    """Return the body of a request whose client stays connected."""
    ask = f"What is {3 * i + 2} + {i}?"
    return {"messages": [{"role": "user", "content": ask}], "temperature": 0, "max_tokens": 24, "stream": i % 2 == 0}


async def answer(http: httpx.AsyncClient, body: dict[str, Any]) -> str:
    reply = await http.post(PATH, json=body)
    assert reply.status_code == 200, reply.text
    if not body["stream"]:
        return reply.json()["choices"][0]["message"]["content"]
    events = [event.removeprefix("data: ") for event in reply.text.split("\n\n") if event]
    assert events[-1] == "[DONE]"
    return "".join(json.loads(event)["choices"][0]["delta"].get("content", "") for event in events[:-1])


async def disconnect(server: Server, rng: random.Random) -> None:
    """Send a long request, and close the connection at a random moment, possibly before the request is sent."""
    words = " ".join(rng.choice(["page", "seven", "radix", "cache"]) for _ in range(rng.randint(1, 300)))
    more = {"n": rng.randint(1, 3), "max_tokens": 400, "ignore_eos": True, "stream": rng.random() < 0.5}
    body = json.dumps({"messages": [{"role": "user", "content": words}], **more}).encode()
    head = f"POST {PATH} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    data = head.encode() + body
    await asyncio.sleep(rng.random() * 2)
    reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rpartition(":")[2]))
    try:
        if rng.random() < 0.1:
            writer.write(data[: rng.randint(1, len(data) - 1)])
        else:
            writer.write(data)
        await writer.drain()
        with_patience = rng.choice([0.0, 0.02, 0.2, 1.5]) * rng.random()
        try:
            async with asyncio.timeout(with_patience):
                while await reader.read(1 << 16):
                    pass
        except TimeoutError:
            pass
        if rng.random() < 0.3:
            writer.transport.abort()  # reset the connection instead of closing it
    finally:
        writer.close()


def test_promises_1_and_9_clients_disconnect(server: Server) -> None:
    """200 clients disconnect at random moments while 20 other requests run.

    The 20 requests get the same responses as before, and within a second the KV pool is whole again.
    """
    rng = random.Random(7)

    async def run() -> tuple[list[str], list[str]]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as http:
            alone = [await answer(http, staying_request(i)) for i in range(20)]
            leaving = [asyncio.create_task(disconnect(server, random.Random(rng.random()))) for _ in range(200)]

            async def later(i: int) -> str:
                await asyncio.sleep(i * 0.1)
                return await answer(http, staying_request(i))

            staying = [asyncio.create_task(later(i)) for i in range(20)]
            await asyncio.gather(*leaving)
            return alone, await asyncio.gather(*staying)

    alone, answers = asyncio.run(run())
    assert answers == alone
    assert server.wait_until_idle(1.0), server.metrics()
    metrics = server.metrics()
    assert metrics["minisgl_scheduler_finished_abort_total"] > 50
    assert metrics["minisgl_scheduler_finished_error_total"] == 0
    assert httpx.get(f"{server.url}/health").status_code == 200
    assert server.log() == ""


def test_disconnect_aborts_the_request(server: Server) -> None:
    body = {"prompt": [5, 6, 7], "max_tokens": 1500, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as reply:
        lines = reply.iter_lines()
        assert next(lines)
        before = server.metrics()["minisgl_scheduler_finished_abort_total"]
    assert server.wait_until_idle(1.0)
    assert server.metrics()["minisgl_scheduler_finished_abort_total"] == before + 1
