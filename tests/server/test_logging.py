"""The log of a real server: every process writes to it, at one level and in one format."""

from __future__ import annotations

import json
import time
from pathlib import Path

import httpx

from minisgl.testing.serving import Server, patient_timeout


def entries(server: Server) -> list[dict[str, str]]:
    """Return the log's lines as JSON objects. A line that is no JSON fails the test."""
    return [json.loads(line) for line in server.log().splitlines()]


def test_json_log_of_every_process(tiny: Path) -> None:
    """Two ranks, the API server and a tokenizer log at debug level, each under its own name and process id."""
    with Server(f"model={tiny}", "tp=2", "num_pages=64", "log_level=debug", "log_format=json") as server:
        httpx.get(f"{server.url}/health").raise_for_status()
        deadline = time.monotonic() + patient_timeout(30)
        while "GET /health" not in server.log() and time.monotonic() < deadline:
            time.sleep(0.05)  # the line is written after the response
        log = entries(server)
        pids = {entry["pid"] for entry in log}
        assert {entry["process"] for entry in log} == {
            "api",
            "scheduler-0",
            "scheduler-1",
            "detokenizer",
            "tokenizer-0",
        }
        assert len(pids) == 5
    said = {(entry["process"], entry["message"]) for entry in log}
    for rank in ("scheduler-0", "scheduler-1"):
        assert any(process == rank and message.startswith("loading weights of Llama") for process, message in said)
        pool = "KV pool: 64 pages of 16 tokens (1024 tokens, 0.00 GiB; memory is committed as it is first used)"
        assert (rank, pool) in said
    assert any(process == "api" and message == f"ready: {server.url}" for process, message in said)
    assert any("GET /health" in message for _, message in said)


def test_log_level_reaches_every_process(tiny: Path) -> None:
    with Server(f"model={tiny}", "num_pages=64", "log_level=error") as server:
        httpx.get(f"{server.url}/health").raise_for_status()
        assert server.log() == ""
