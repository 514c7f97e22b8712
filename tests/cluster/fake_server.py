"""A server that computes nothing, for the tests of routers: it starts in a moment. It takes any options.

It behaves as ``python -m minisgl.cluster.attached`` does: it prints its URL, ends when standard input is closed, and
finishes open requests after SIGTERM. It answers a prompt with its own process id, once for each of ``max_tokens``, and
waits ``delay`` seconds before each. The file of the option ``test.script``, or the environment variable
``FAKE_SCRIPT``, changes its behaviour: see `main`.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

OPEN: set[asyncio.Task] = set()
ABORTED: list[int] = []


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    task = asyncio.current_task()
    try:
        while head := await reader.readuntil(b"\r\n\r\n"):
            line, *headers = head.decode().split("\r\n")
            method, path, _ = line.split(" ")
            values = {name.lower(): value for name, _, value in (header.partition(": ") for header in headers)}
            body = await reader.readexactly(int(values.get("content-length", 0)))
            if method == "GET":
                info = {"page_size": 16, "context_length": 2048, "pid": os.getpid(), "aborted": len(ABORTED)}
                info |= {"served_model_name": "tutor", "model_path": "tutor", "data": [{"id": "tutor"}]}
                send_json(writer, 200, info | {"path": path, "id": values.get("x-request-id", "")})
                continue
            OPEN.add(task)
            try:
                await complete(json.loads(body), writer)
            except ConnectionError:
                ABORTED.append(1)
                raise
            finally:
                OPEN.discard(task)
            if STOPPING.is_set():
                break
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    finally:
        writer.close()


async def complete(request: dict, writer: asyncio.StreamWriter) -> None:
    count, delay = request.get("max_tokens", 1), request.get("delay", 0.0)
    if request.get("kill"):
        os.kill(os.getpid(), signal.SIGKILL)
    if request.get("stream"):
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        for _ in range(count):
            await asyncio.sleep(delay)
            event = f"data: {json.dumps({'choices': [{'index': 0, 'text': f'{os.getpid()} '}]})}\n\n".encode()
            writer.write(b"%x\r\n%b\r\n" % (len(event), event))
            await writer.drain()
        writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
    else:
        await asyncio.sleep(count * delay)
        send_json(writer, 200, {"choices": [{"index": 0, "text": f"{os.getpid()} " * count}]})
    await writer.drain()


def send_json(writer: asyncio.StreamWriter, status: int, value: object) -> None:
    data = json.dumps(value).encode()
    head = f"HTTP/1.1 {status} OK\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)


def watch_input() -> None:
    while os.read(0, 4096):
        pass
    os._exit(1)


async def main(script: dict) -> None:
    """Run the server. ``script`` may have: ``exit`` (a status), ``never_ready``, ``child`` (starts a child)."""
    print("starting", os.getpid(), *sys.argv[1:], file=sys.stderr, flush=True)
    if "exit" in script:
        print("minisgl: the script says so", file=sys.stderr, flush=True)
        raise SystemExit(script["exit"])
    if script.get("child"):
        subprocess.Popen(
            [sys.executable, "-c", "import time, signal; signal.signal(2, signal.SIG_IGN); time.sleep(600)"]
        )
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, STOPPING.set)
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    if script.get("never_ready"):
        await asyncio.sleep(600)
    print(f"minisgl is ready: http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await STOPPING.wait()
    server.close()
    if OPEN:
        await asyncio.wait(OPEN)


STOPPING = asyncio.Event()
if __name__ == "__main__":
    threading.Thread(target=watch_input, daemon=True).start()
    found = [word.partition("=")[2] for word in sys.argv[1:] if word.startswith("test.script=")]
    asyncio.run(main(json.loads(Path(found[0]).read_text() if found else os.environ.get("FAKE_SCRIPT", "{}"))))
