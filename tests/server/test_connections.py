"""Connections of slow and silent clients: they are bounded and ended, and other clients are served meanwhile."""

from __future__ import annotations

import json
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from minisgl.testing.serving import Server, scaled_timeout


@pytest.fixture(scope="module")
def server(tiny: Path) -> Iterator[Server]:
    """Start a server whose clients must send and read within a second."""
    with Server(f"model={tiny}", "num_pages=2048", "server.io_timeout=1", "log_level=warning") as server:
        yield server


def connect(server: Server) -> socket.socket:
    host, _, port = server.url.removeprefix("http://").rpartition(":")
    return socket.create_connection((host, int(port)), timeout=scaled_timeout(60))


def read_all(client: socket.socket) -> bytes:
    data = b""
    while piece := client.recv(1 << 16):
        data += piece
    return data


HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"


@pytest.mark.parametrize("sent", [b"", b"POST /v1", HEAD % 100, HEAD % 100 + b'{"prompt":'])
def test_slow_request_is_ended(server: Server, sent: bytes) -> None:
    with connect(server) as client:
        client.sendall(sent)
        assert read_all(client).startswith(b"HTTP/1.1 408 ")
    assert httpx.get(f"{server.url}/health", timeout=30).status_code == 200
    assert server.log() == ""


def test_headers_byte_by_byte_are_ended(server: Server) -> None:
    """A client that sends one byte after the other does not renew the time-out."""
    with connect(server) as client:
        client.settimeout(0.1)
        data = b""
        deadline = time.monotonic() + scaled_timeout(60)
        while not data and time.monotonic() < deadline:
            try:
                client.sendall(b"x")
                data = client.recv(100)
            except TimeoutError:
                continue
        assert data.startswith(b"HTTP/1.1 408 ")


def test_long_response_is_not_ended(server: Server) -> None:
    """The time-out is no limit of the time in which a request is served."""
    body = {"prompt": [5, 6], "max_tokens": 4000, "ignore_eos": True}
    reply = httpx.post(f"{server.url}/v1/completions", json=body, timeout=scaled_timeout(120))
    assert reply.json()["usage"]["completion_tokens"] == 4000
    assert reply.elapsed.total_seconds() > 1


def test_stream_that_nobody_reads_is_ended(server: Server) -> None:
    """The request of a client that reads nothing is aborted, and its memory is freed."""
    more = {"n": 8, "max_tokens": 8000, "ignore_eos": True, "stream": True, "logprobs": 5, "temperature": 1}
    body = json.dumps({"prompt": [5, 6], **more}).encode()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        host, _, port = server.url.removeprefix("http://").rpartition(":")
        client.connect((host, int(port)))
        client.sendall(HEAD % len(body) + body)
        deadline = time.monotonic() + scaled_timeout(90)
        while server.metrics()["minisgl_scheduler_finished_abort_total"] < 8 and time.monotonic() < deadline:
            time.sleep(0.2)
        assert server.metrics()["minisgl_scheduler_finished_abort_total"] >= 8
        assert server.idle_pool()
    assert "Traceback" not in server.log()


LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[2])))
from minisgl.server.connections import raise_file_limit
print(*raise_file_limit(), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


@pytest.mark.parametrize(("soft", "hard"), [(256, 512), (512, 4096), (4096, 4096)])
def test_soft_limit_is_raised(soft: int, hard: int) -> None:
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if most != resource.RLIM_INFINITY and most < hard:
        pytest.skip("the hard limit of this machine is lower")
    ran = subprocess.run(
        [sys.executable, "-c", LIMITED, str(soft), str(hard)], capture_output=True, text=True, check=True
    )
    connections, backlog, now = map(int, ran.stdout.split())
    assert now == hard
    assert connections + backlog < hard
    assert connections > hard // 4
