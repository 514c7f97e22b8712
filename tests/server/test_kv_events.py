"""KV events of a real server: what a subscriber outside of it rebuilds, a kill, a restart, and the end."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import signal
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from minisgl.cluster.process import free_port
from minisgl.testing.serving import Server, patient_timeout

EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "examples" / "kv_events" / "subscriber.py"


@pytest.fixture
def subscriber_class() -> Any:
    """Return the class `Subscriber` of the documentation's example."""
    spec = importlib.util.spec_from_file_location("kv_events_subscriber", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Subscriber


@pytest.fixture
def options() -> list[str]:
    """Return the options of a server that publishes at two free ports."""
    addresses = {key: f"tcp://127.0.0.1:{free_port()}" for key in ("endpoint", "replay_endpoint")}
    return ["model=tutor", "num_pages=64", *(f"kv_events.{key}={address}" for key, address in addresses.items())]


def hashes(tokens: list[int], salt: str = "") -> Iterator[int]:
    """Yield the hashes of a prompt's pages of 16 tokens, as docs/operation/kv-events.md describes them."""
    parent = hashlib.sha256(b"0").digest()[:8]
    for end in range(16, len(tokens) + 1, 16):
        page = struct.pack("<16i", *tokens[end - 16 : end])
        parent = hashlib.sha256(parent + page + salt.encode()).digest()[:8]
        salt = ""
        yield int.from_bytes(parent, "big")


def generate(server: Server, prompt: list[int], **more: Any) -> list[int]:
    """Return the tokens of the prompt and of the answer."""
    body = {"prompt": prompt, "max_tokens": 20, "temperature": 0, "ignore_eos": True, "return_token_ids": True, **more}
    response = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
    assert response.status_code == 200, response.text
    return [*prompt, *response.json()["choices"][0]["token_ids"]]


def expect(server: Server, subscriber: Any, blocks: set[int]) -> None:
    """Wait until the subscriber has these blocks. The server must have as many cached pages."""
    end = time.monotonic() + patient_timeout(30)
    while subscriber.blocks != blocks:
        assert time.monotonic() < end, (subscriber.last, sorted(subscriber.blocks), sorted(blocks))
        subscriber.poll(0.1)
    assert subscriber.complete
    assert server.metrics()["minisgl_scheduler_num_cached_pages"] == len(blocks)


def test_a_server_and_its_successor(options: list[str], subscriber_class: Any) -> None:
    """The first server is killed. The second one has two ranks, of which only rank 0 publishes."""
    subscriber = subscriber_class(*(word.partition("=")[2] for word in options[-2:]))
    prompt = list(range(100, 140))
    with Server(*options) as server:
        tokens = generate(server, prompt)
        blocks = {*hashes(tokens[:-1])}  # the KV of the last token was never computed
        expect(server, subscriber, blocks)
        salted = generate(server, prompt, cache_salt="tenant")
        expect(server, subscriber, blocks := blocks | {*hashes(salted[:-1], "tenant")})
        generate(server, prompt)
        expect(server, subscriber, blocks)  # nothing new
        metrics = server.metrics()
        assert metrics["minisgl_kv_events_stored_blocks_total"] == len(blocks)
        assert metrics["minisgl_kv_events_errors_total"] == 0
        os.kill(server.process.pid, signal.SIGKILL)
        server.wait(patient_timeout(10))
    assert subscriber.restarts == 0
    with Server(*options, "tp=2") as server:
        other = generate(server, list(range(200, 240)))
        expect(server, subscriber, {*hashes(other[:-1])})
        assert subscriber.restarts == 1
        server.process.send_signal(signal.SIGINT)
        assert server.wait(patient_timeout(20)) == 130
        end = time.monotonic() + patient_timeout(2)
        while server.leftovers():
            assert time.monotonic() < end, server.leftovers()
            time.sleep(0.05)
    subscriber.close()
