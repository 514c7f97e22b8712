"""A server with the streaming part of the OpenAI API and fixed delays, in a process of its own.

The path before ``/v1`` says how it answers: ``/50-10/v1/completions`` sends the first token after 50 ms and then one
every 10 ms; ``/status503/v1/…`` and the other names of `BEHAVIOURS` answer wrongly. ``GET /log`` returns the requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import subprocess
import sys
import time
import urllib.request
from types import TracebackType
from typing import Any

BEHAVIOURS = {
    "status503": "answers with status 503 and an error object",
    "html": "answers with status 502 and a page in HTML",
    "half": "answers every second request with status 500",
    "truncated": "closes the connection after three tokens",
    "error-event": "sends an error object in the stream",
    "bad-event": "sends an event that is not JSON",
    "short": "sends one token less than max_tokens",
    "no-usage": "sends no usage",
    "no-end": "sends no finish_reason and no [DONE]",
    "json": "answers with one JSON object",
    "empty": "sends a stream without tokens",
    "until-close": "sends a stream without chunks, which ends with the connection",
    "bytewise": "sends every byte in a chunk of its own, with comments and CRLF between events",
    "drafting": "has counts of drafts in /metrics: ten runs of three drafts for each request answered so far",
    "stuck": "sends two tokens and then nothing",
    "garbage": "sends something that is not HTTP",
    "idle-close": "closes each connection after its response, without saying so",
}
MAX_MODEL_LEN = 4096


class FakeServer:
    """Starts the server, to use as a context manager. ``url`` is its address."""

    def __enter__(self) -> FakeServer:
        self.process = subprocess.Popen([sys.executable, __file__], stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.url = f"http://127.0.0.1:{int(self.process.stdout.readline())}"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def take_log(self) -> list[dict[str, Any]]:
        """Return the requests since the last call: path, headers, body, arrival, and the number in flight."""
        with urllib.request.urlopen(f"{self.url}/log", timeout=30) as response:
            found: list[dict[str, Any]] = json.load(response)
        return found


LOG: list[dict[str, Any]] = []
IN_FLIGHT = 0
ANSWERED = 0


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
        while await _serve_one(reader, writer):
            pass
    writer.close()


async def _serve_one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
    """Answer one request. Return whether the connection stays open."""
    global IN_FLIGHT, ANSWERED
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    method, target, _ = head.split("\r\n", 1)[0].split(" ")
    headers = {k.lower(): v for k, v in re.findall(r"^([\w-]+): (.*)\r$", head, re.MULTILINE)}
    base, _, rest = target.partition("/v1")
    if method == "GET":
        content = LOG if target == "/log" else _draft_counts() if target == "/drafting/metrics" else _models()
        _plain(writer, 200, content)
        if target == "/log":
            LOG.clear()
        return True
    arrival = time.perf_counter()
    body = json.loads(await reader.readexactly(int(headers["content-length"])))
    IN_FLIGHT += 1
    ANSWERED += 1
    LOG.append({"path": target, "headers": headers, "body": body, "arrival": arrival, "in_flight": IN_FLIGHT})
    try:
        return await _answer(writer, base.strip("/"), "chat" in rest, body)
    finally:
        IN_FLIGHT -= 1


def _models() -> dict[str, Any]:
    return {"object": "list", "data": [{"id": "fake", "object": "model", "max_model_len": MAX_MODEL_LEN}]}


def _draft_counts() -> str:
    """Return the metrics of vLLM's speculative decoding, for two engines that share the work."""
    counts = {"drafts": 10, "draft_tokens": 30, "accepted_tokens": 12}
    per_position = {f'accepted_tokens_per_pos_total{{engine="%d",position="{k}"}}': 8 - 4 * k for k in range(3)}
    names = {f'{name}_total{{engine="%d"}}': count for name, count in counts.items()} | per_position
    return "".join(
        f"vllm:spec_decode_num_{name % engine} {count * ANSWERED / 2 + engine}\n"
        for name, count in names.items()
        for engine in (0, 1)
    )


def _plain(writer: asyncio.StreamWriter, status: int, content: Any) -> None:
    data = content.encode() if isinstance(content, str) else json.dumps(content).encode()
    kind = "text/html" if isinstance(content, str) else "application/json"
    writer.write(f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data)


async def _answer(writer: asyncio.StreamWriter, how: str, chat: bool, body: dict[str, Any]) -> bool:
    if how == "status503":
        _plain(writer, 503, {"error": {"message": "The queue is full.", "code": 503}})
        return True
    if how == "html":
        _plain(writer, 502, "<h1>Bad gateway</h1>")
        return True
    if how == "half" and ANSWERED % 2:
        _plain(writer, 500, {"detail": "odd"})
        return True
    if how == "json":
        _plain(writer, 200, {"choices": [{"text": "all at once"}]})
        return True
    if how == "garbage":
        writer.write(b"SMTP ready\r\n\r\n")
        return False
    delays = re.fullmatch(r"(\d+)-(\d+)", how)
    ttft, itl = (int(delays[1]) / 1e3, int(delays[2]) / 1e3) if delays else (0.0, 0.0)
    chunked = how != "until-close"
    framing = "transfer-encoding: chunked" if chunked else "connection: close"
    writer.write(f"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n{framing}\r\n\r\n".encode())

    def send(event: Any) -> None:
        data = f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n".encode()
        if how == "bytewise":
            data = b": a comment\r\n" + data.replace(b"\n", b"\r\n")
            writer.write(b"".join(b"1\r\n%c\r\n" % byte for byte in data))
        else:
            writer.write(b"%x\r\n%s\r\n" % (len(data), data) if chunked else data)

    start = asyncio.get_running_loop().time()
    if chat:
        send({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})
    tokens = {"empty": 0, "short": body["max_tokens"] - 1}.get(how, body["max_tokens"])
    for i in range(tokens):
        due = start + ttft + i * itl
        await asyncio.sleep(max(0.0, due - asyncio.get_running_loop().time()))
        if how == "truncated" and i == 3:
            return False
        if how == "stuck" and i == 2:
            await asyncio.sleep(3600)
        if how in ("error-event", "bad-event") and i == 1:
            send({"error": {"message": "The engine died."}} if how == "error-event" else "{not json")
        end = "length" if i == tokens - 1 and how != "no-end" else None
        text = {"delta": {"content": " a"}} if chat else {"text": " a"}
        send({"choices": [{"index": 0, **text, "finish_reason": end}], "usage": None})
    prompt = body.get("prompt", "")
    usage = {"prompt_tokens": len(prompt), "completion_tokens": tokens, "prompt_tokens_details": {"cached_tokens": 1}}
    if how != "no-usage":
        send({"choices": [], "usage": usage})
    if how != "no-end":
        send("[DONE]")
    if chunked:
        writer.write(b"0\r\n\r\n")
    await writer.drain()
    return chunked and how != "idle-close"


async def main() -> None:
    server = await asyncio.start_server(serve, "127.0.0.1", 0, limit=2**24, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
