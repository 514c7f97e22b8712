"""`python -m minisgl.demo`: serves the embedded model, sends it three chat requests, and prints the streamed replies.

The demo starts a server on a free port, uses it over HTTP, and stops it. It uses no part of the engine directly. Its
arguments are options of the server (``python -m minisgl.demo tp=2``).
"""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from minisgl.cluster.attached import READY, HeldLog, read_url

TIMEOUT_SECONDS = 120.0
"""Seconds that the demo waits for the server to reply, and to exit."""

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
    """The timing of one reply: seconds until its first and its last token, and the numbers of tokens."""

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
    """Run the demo. Return the exit status: 0 if all three replies arrived and the server then exited with 0.

    The server's log is shown until the server is ready, and after an error. It would be in the middle of the replies.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    command = [sys.executable, "-m", "minisgl", "model=tutor", "server.port=0", *words]
    print("$", "python", *command[1:], flush=True)
    begun = time.monotonic()
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace")
    assert server.stdout is not None
    assert server.stderr is not None
    log = HeldLog(words)
    log.read(server.stderr)
    try:
        address = read_url(server.stdout)
        if address is None:
            status = server.wait(TIMEOUT_SECONDS)
            log.join()
            print(f"The server did not start (exit status {status}).", file=sys.stderr)
            return 1
        log.read(server.stdout)
        log.hold()
        print(f"{READY}{address} (started in {time.monotonic() - begun:.1f} s)", flush=True)
        for messages in QUESTIONS:
            _show(address, messages)
            if log.always:
                log.release()
                log.hold()
        server.send_signal(signal.SIGTERM)
        status = server.wait(TIMEOUT_SECONDS)
        if status:
            log.release()
        print(f"\nThe server ended with status {status}. Start it yourself: python -m minisgl")
        return status
    except (RuntimeError, OSError, http.client.HTTPException) as error:
        print(f"\nThe demo failed: {error or type(error).__name__}", file=sys.stderr)
        log.release()
        return 1
    except KeyboardInterrupt:
        print()
        return 130
    finally:
        _end(server)


def _end(server: subprocess.Popen[str]) -> None:
    """Stop the server if it still runs: with SIGINT, and after 10 seconds with SIGKILL."""
    if server.poll() is None:
        server.send_signal(signal.SIGINT)
        try:
            server.wait(10)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _show(address: str, messages: list[dict[str, str]]) -> None:
    """Send one chat request. Print its messages, the reply as it is streamed, and the reply's timing."""
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
    """Yield the events (chunks) of a streamed chat completion. Raise RuntimeError if the request fails."""
    url = urlsplit(address)
    connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=TIMEOUT_SECONDS)
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
