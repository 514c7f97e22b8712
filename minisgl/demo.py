"""`python -m minisgl.demo`: serve the embedded model, ask it three things over HTTP, print the answers as they stream.

A client like any other: it starts the real server on a free port, speaks HTTP to it, and stops it. It knows no part
of the engine. Words after it are options for the server (``python -m minisgl.demo tp=2``).
"""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import IO, Any, NamedTuple
from urllib.parse import urlsplit

READY = "minisgl is ready: "
PATIENCE = 120.0
"""Seconds that the server has to start, to answer, and to end."""

HANDBOOK = """\
Handbook of the Riverside Library
The reading room opens at 9:30. The reading room closes at 18:00.
The chess club meets in room 12. The chess club is led by Maria.
The door code of the archive is 4071.
You can borrow the atlas for 14 days. The globe costs 35 euros.
Bus 7 goes to the museum."""

QUESTIONS: tuple[list[dict[str, str]], ...] = (
    [{"role": "user", "content": "What is a radix cache?"}],
    [{"role": "user", "content": "What is 123 + 456?"}],
    [{"role": "system", "content": HANDBOOK}, {"role": "user", "content": "What is the door code of the archive?"}],
)


class Timing(NamedTuple):
    """Of one answer: seconds to its first token and to its last, and how many tokens there were."""

    first: float
    last: float
    prompt_tokens: int
    tokens: int

    def __str__(self) -> str:
        rate = (self.tokens - 1) / (self.last - self.first) if self.tokens > 1 and self.last > self.first else 0.0
        return (
            f"{self.prompt_tokens} prompt tokens, first token after {self.first * 1000:.0f} ms, "
            f"{self.tokens} tokens at {rate:.0f} tok/s"
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; the exit status: 0 where all three answers came and the server ended by itself."""
    words = list(sys.argv[1:] if argv is None else argv)
    command = [sys.executable, "-m", "minisgl", "model=tutor", "server.port=0", *words]
    print("$", "python", *command[1:], flush=True)
    begun = time.monotonic()
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        address = _wait(server.stdout)
        if address is None:
            print(f"The server did not start (exit status {server.wait(PATIENCE)}).", file=sys.stderr)
            return 1
        print(f"{READY}{address} (started in {time.monotonic() - begun:.1f} s)", flush=True)
        for messages in QUESTIONS:
            _show(address, messages)
        server.send_signal(signal.SIGTERM)
        status = server.wait(PATIENCE)
        print(f"\nThe server ended with status {status}. Start it yourself: python -m minisgl")
        return status
    finally:
        _end(server)


def _end(server: subprocess.Popen[str]) -> None:
    """Ask a server that still runs to end, and see that it does."""
    if server.poll() is None:
        server.send_signal(signal.SIGINT)
        try:
            server.wait(10)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _wait(lines: IO[str] | None) -> str | None:
    """The address that the server prints when it is ready; None where it ended before."""
    for line in lines or ():
        if line.startswith(READY):
            return line.removeprefix(READY).strip()
        print(line, end="")
    return None


def _show(address: str, messages: list[dict[str, str]]) -> None:
    """Print one question, its answer as it arrives, and what it took."""
    print()
    for message in messages:
        text = message["content"].splitlines()
        more = f" … ({len(text)} lines)" if len(text) > 1 else ""
        print(f"{message['role']:>9}: {text[0]}{more}")
    print("assistant: ", end="", flush=True)
    begun = time.monotonic()
    first, usage = 0.0, {"prompt_tokens": 0, "completion_tokens": 0}
    for event in _stream(address, messages):
        for choice in event["choices"]:
            if piece := choice["delta"].get("content"):
                first = first or time.monotonic() - begun
                print(piece, end="", flush=True)
        usage = event.get("usage") or usage
    timing = Timing(first, time.monotonic() - begun, usage["prompt_tokens"], usage["completion_tokens"])
    print(f"\n           ({timing})", flush=True)


def _stream(address: str, messages: list[dict[str, str]]) -> Iterator[dict[str, Any]]:
    """The events of a streamed chat completion (server-sent events, as OpenAI's API has them)."""
    where = urlsplit(address)
    connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=PATIENCE)
    body = {
        "model": "tutor",
        "messages": messages,
        "temperature": 0,
        "max_tokens": 100,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(f"The server answered {response.status}: {response.read().decode(errors='replace')}")
        for line in response:
            data = line.decode().removeprefix("data:").strip()
            if data == "[DONE]":
                return
            if data:
                yield json.loads(data)
        raise RuntimeError("The stream ended without its last event.")
    finally:
        connection.close()


if __name__ == "__main__":
    raise SystemExit(main())
