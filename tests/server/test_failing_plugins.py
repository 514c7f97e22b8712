"""Plugins that fail while a server runs: it goes on without their metrics, or says which plugin ended it."""

from __future__ import annotations

import signal
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from minisgl.testing.serving import Server, patient_timeout

FILE = """
import os, sys
from dataclasses import dataclass
from minisgl import hookimpl
from minisgl.plugins.speculation import DraftProposer

@dataclass
class Bad:
    def build(self):
        return Proposer()

class Proposer(DraftProposer):
    max_drafts = 2

    def propose(self, reqs, positions, limits):
        {propose}

@hookimpl
def minisgl_configs():
    yield "speculation", "bad", Bad

@hookimpl
def minisgl_request_finished(req):
    {finished}

@hookimpl
def minisgl_closed():
    {closed}

@hookimpl
def minisgl_metrics():
    {metrics}
"""
PASSES = {"propose": "return [()] * len(reqs)", "finished": "pass", "closed": "pass", "metrics": "return None"}


def plugin(folder: Path, **bodies: str) -> str:
    path = folder / "failing.py"
    path.write_text(FILE.format(**{**PASSES, **bodies}))
    return str(path)


def complete(server: Server) -> httpx.Response:
    body = {"prompt": "abcabcabc", "max_tokens": 8, "ignore_eos": True}
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=patient_timeout(60))


@pytest.mark.parametrize("metrics", ["sys.exit(0)", "return 'x \\udcff'"])
def test_bad_metrics_end_no_server(tiny: Path, tmp_path: Path, metrics: str) -> None:
    """Anyone may ask for the metrics: an observer that fails then costs its own metrics only, and one line of log."""
    path = plugin(tmp_path, metrics=metrics)
    with Server(f"model={tiny}", "num_pages=64", f"plugins={path}") as server:
        for _ in range(3):
            answer = httpx.get(f"{server.url}/metrics").raise_for_status()
            names = {family.name for family in text_string_to_metric_families(answer.text)}
            assert {"minisgl_request_queue_time_seconds", "minisgl_http_requests"} <= names
        assert complete(server).status_code == 200
        said = [line for line in server.log().splitlines() if "minisgl_metrics of" in line]
        assert len(said) == 1 and path in said[0]
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(patient_timeout(30)) == 0


@pytest.mark.parametrize(
    ("bodies", "words"),
    [
        ({"propose": "raise KeyError('lost')"}, ["propose", "KeyError: 'lost'"]),
        ({"propose": "sys.exit(0)"}, ["propose", "SystemExit: 0"]),
        ({"finished": "raise KeyboardInterrupt"}, ["minisgl_request_finished", "KeyboardInterrupt"]),
    ],
)
def test_error_names_the_plugin(tiny: Path, tmp_path: Path, bodies: dict[str, str], words: list[str]) -> None:
    """The log and the error of the open request name the file and the hook, and the status is not 0."""
    path = plugin(tmp_path, **bodies)
    with Server(f"model={tiny}", "num_pages=64", f"plugins={path}", "speculation=bad") as server:
        answer = complete(server)
        assert server.process.wait(patient_timeout(30)) == 1
        (line,) = [line for line in server.log().splitlines() if "launcher: scheduler-0 died" in line]
    for word in [path, *words]:
        assert word in line
        assert answer.status_code == 200 or word in answer.json()["error"]["message"]


def test_process_that_ends_without_a_word(tiny: Path, tmp_path: Path) -> None:
    path = plugin(tmp_path, finished="os._exit(0)")
    with Server(f"model={tiny}", "num_pages=64", f"plugins={path}") as server:
        complete(server)
        assert server.process.wait(patient_timeout(30)) == 1
        assert "scheduler-0 died: it ended with status 0, without an error message" in server.log()


def test_failure_at_the_end(tiny: Path, tmp_path: Path) -> None:
    path = plugin(tmp_path, closed="sys.exit(0)")
    with Server(f"model={tiny}", "num_pages=64", f"plugins={path}") as server:
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(patient_timeout(30)) == 1
        assert path in server.log() and "minisgl_closed" in server.log()
