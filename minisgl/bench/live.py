"""``python -m minisgl.bench live``: what open pages of the live view cost a server, in throughput and in CPU time.

A server gets the same requests again and again, with no page, with one and with five. The turns are interleaved, so a
machine that becomes busy slows all of them down. Each request streams its tokens over a connection of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import psutil
from rich.console import Console
from rich.table import Table

from minisgl.bench.arguments import add_json, add_options, parse, write_json
from minisgl.config import ConfigError
from minisgl.options.compose import plain_errors
from minisgl.plugins.live.view.extension import LINGER_SECONDS
from minisgl.testing.serving import Server

PAGES = (0, 1, 5)


@dataclass(frozen=True)
class Turn:
    """One turn: all requests with this number of open pages."""

    pages: int
    tokens_per_second: float
    cpu_ms_per_token: float
    """CPU time of all processes of the server for each output token."""
    bytes_per_page: int
    """What one page received."""


def main(argv: Sequence[str]) -> None:
    p = argparse.ArgumentParser(prog="python -m minisgl.bench live", description=__doc__)
    add_options(p, "as for `python -m minisgl` (default: model=tutor)")
    p.add_argument("--rows", type=int, default=64, help="requests at a time (default 64)")
    p.add_argument("--output", type=int, default=200, help="output tokens of each request (default 200)")
    p.add_argument("--turns", type=int, default=7, help="turns with each number of pages (default 7)")
    p.add_argument(
        "--pages", type=int, nargs="+", default=PAGES, metavar="N", help=f"numbers of pages (default {PAGES})"
    )
    p.add_argument("--start", type=float, default=600.0, help="seconds in which the server must be ready (default 600)")
    add_json(p)
    args = parse(p, argv)
    with plain_errors("minisgl.bench"):
        if min(args.rows, args.output, args.turns) < 1 or min(args.pages) < 0:
            raise ConfigError("--rows, --output and --turns must be at least 1, and --pages at least 0.")
        options = (
            args.options if any(word.startswith("model=") for word in args.options) else ["model=tutor", *args.options]
        )
        with Server(*options, timeout=args.start) as server:
            turns = asyncio.run(_measure(server, args))
    show(turns)
    write_json(args, {"options": options, "rows": args.rows, "output": args.output,
                      "turns": [asdict(turn) for turn in turns]})  # fmt: skip


async def _measure(server: Server, args: argparse.Namespace) -> list[Turn]:
    numbers = list(args.pages)
    await _turn(server, 0, args)  # warms up
    order = [pages for i in range(args.turns) for pages in numbers[i % len(numbers) :] + numbers[: i % len(numbers)]]
    return [await _turn(server, pages, args) for pages in order]


async def _turn(server: Server, pages: int, args: argparse.Namespace) -> Turn:
    """Run all requests once, while ``pages`` pages read the events."""
    await asyncio.sleep(0 if pages else LINGER_SECONDS + 1)  # after the last page, the events go on for a while
    viewers = [_Viewer(server.url) for _ in range(pages)]
    for viewer in viewers:
        await viewer.open()
    before, since = _cpu_seconds(server), time.perf_counter()
    await asyncio.gather(*(_generate(server.url, i, args.output) for i in range(args.rows)))
    seconds, cpu = time.perf_counter() - since, _cpu_seconds(server) - before
    received = [await viewer.close() for viewer in viewers]
    tokens = args.rows * args.output
    return Turn(pages, tokens / seconds, 1000 * cpu / tokens, max(received, default=0))


def _cpu_seconds(server: Server) -> float:
    """Return the CPU time of the server's processes so far."""
    root = psutil.Process(server.process.pid)
    times = [each.cpu_times() for each in (root, *root.children(recursive=True))]
    return sum(each.user + each.system for each in times)


async def _send(url: str, head: str, body: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send a request, and return the connection after the headers of a response of status 200."""
    host, _, port = url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 24)
    lines = [f"{head} HTTP/1.1", f"host: {host}:{port}", "connection: close", "content-type: application/json"]
    writer.write("\r\n".join([*lines, f"content-length: {len(body)}", "", ""]).encode() + body)
    status = await reader.readline()
    if b" 200 " not in status:
        raise ConfigError(f"{head} was answered with {status.decode().strip()}: is the live view on?")
    await reader.readuntil(b"\r\n\r\n")
    return reader, writer


async def _generate(url: str, number: int, output: int) -> None:
    """Stream one answer to its end."""
    body = {
        "prompt": [5 + number % 50] * 16,
        "max_tokens": output,
        "ignore_eos": True,
        "stream": True,
        "temperature": 0,
    }
    reader, writer = await _send(url, "POST /v1/completions", json.dumps(body).encode())
    last = b""
    while part := await reader.read(1 << 16):
        last = (last + part)[-64:]
    writer.close()
    if b"[DONE]" not in last:
        raise ConfigError("An answer ended early: look at the server's log.")


class _Viewer:
    """Reads the events as a page does, and counts their bytes."""

    def __init__(self, url: str):
        self._url, self._size = url, 0

    async def open(self) -> None:
        self._reader, self._writer = await _send(self._url, "GET /live")
        self._task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        while part := await self._reader.read(1 << 16):
            self._size += len(part)

    async def close(self) -> int:
        self._task.cancel()
        self._writer.close()
        await self._writer.wait_closed()
        return self._size


def show(turns: Sequence[Turn]) -> None:
    """Print the median of the turns with each number of pages, and what they differ by from the first."""
    table = Table(box=None, pad_edge=False)
    for name in ("pages", "tokens a second", "", "CPU ms a token", "", "bytes a page"):
        table.add_column(name, justify="right")
    first: tuple[float, float] | None = None
    for pages in sorted({turn.pages for turn in turns}):
        these = [turn for turn in turns if turn.pages == pages]
        speed = statistics.median(turn.tokens_per_second for turn in these)
        cpu = statistics.median(turn.cpu_ms_per_token for turn in these)
        first = first or (speed, cpu)
        table.add_row(
            str(pages), f"{speed:,.0f}", f"{100 * (speed / first[0] - 1):+.1f} %", f"{cpu:.3f}",
            f"{100 * (cpu / first[1] - 1):+.1f} %", f"{max(turn.bytes_per_page for turn in these):,}",
        )  # fmt: skip
    Console().print(table)
