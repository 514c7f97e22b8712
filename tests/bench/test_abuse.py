"""Each abuse gets the answers that it should, leaves nothing behind, and other clients are served meanwhile."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from minisgl.bench.abuses.catalogue import ABUSES
from minisgl.bench.abuses.sending import UNANSWERED
from minisgl.bench.abuses.watch import MEMORY_MB, Report, Watched, abuse, warm_up
from minisgl.testing.serving import Server

pytestmark = pytest.mark.xdist_group("test_abuse")  # one process: the server starts once

PAUSE_SECONDS = 0.2
"""Seconds between two requests of another client. Nearly all of the server's CPU time goes into these requests."""
OPEN = "still open"
EXPECTED = {
    "integers": {"400"},
    "nesting": {"400"},
    "stop strings": {"400"},
    "allowed stop strings": {"200"},
    "stop token ids": {"400"},
    "lists as prompts": {"400"},
    "long texts": {"400"},
    "bodies above the limit": {"413"},
    "many turns": {"400"},
    "chats within the bounds": {"400"},
    "ids to detokenize": {"400"},
    "pages of other sites": {"403", "415"},
    "queue filled by prompts": {OPEN, "503"},
    "queue filled by n": {OPEN, "200", "503"},
    "too many choices": {"400"},
    "half bodies": {OPEN, UNANSWERED},
    "silent connections": {OPEN},
    "slow requests": {OPEN},
    "unread streams": {OPEN},
    "5,000 requests": {"200", "503", OPEN},
    "abandoned streams": {"200"},
    "no HTTP": {"400"},
    "large headers": {"431"},
    "pipelined requests": {"200", UNANSWERED},
    "sockets of the processes": {"sent"},
}


def attack(server: Server, name: str) -> Report:
    """Run an abuse for a second."""
    return abuse(Watched(server.url, server.processes, str(server.folder)), name, seconds=1, pause=PAUSE_SECONDS)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """Start a server whose memory has reached its level.

    The first 5,000 requests at once take about 50 MB, which later ones use again.
    """
    with Server("model=tutor", "num_pages=1024", "log_level=warning") as server:
        warm_up(server.url, answers=64, tokens=240)
        attack(server, "5,000 requests")
        yield server


def test_every_abuse_is_tested() -> None:
    assert EXPECTED.keys() == ABUSES.keys()


@pytest.mark.parametrize("name", ABUSES)
def test_abuse(server: Server, name: str) -> None:
    report = attack(server, name)
    assert report.answers.keys() <= EXPECTED[name]
    assert sum(report.answers.values()) > 0
    assert report.failed == 0 or "503" in report.answers  # "5,000 requests" may fill the queue
    assert report.health_failed == 0
    assert report.requests > 0
    assert report.open_requests == 0
    assert report.memory_after_mb is not None
    assert report.memory_before_mb is not None
    assert report.memory_after_mb <= report.memory_before_mb + MEMORY_MB
    assert server.wait_until_idle(60)
    assert "Traceback" not in server.log()


def test_command(server: Server, tmp_path: Path) -> None:
    """The command abuses a running server too, whose memory it can't see, and writes its results."""
    file = tmp_path / "abuse.json"
    command = [sys.executable, "-m", "minisgl.bench", "abuse", "--url", server.url, "--seconds", "1", "--json", file]
    ran = subprocess.run([*command, "--only", "integers"], capture_output=True, text=True, check=True)
    assert "× 400" in ran.stdout
    (report,) = json.loads(file.read_text())["abuses"]
    assert report.keys() == set(Report._fields)
    assert set(report["answers"]) == {"400"}
    assert report["p99_ms"] > 0
    assert report["memory_before_mb"] is None
