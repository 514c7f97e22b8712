"""``python -m minisgl.cluster`` as a process, with servers that compute nothing: signals, deaths, what is left."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from minisgl.cluster.cli import main
from minisgl.testing.serving import patient_timeout

START = Callable[..., Any]
CHAT = "/v1/completions"


class Request(threading.Thread):
    """A request in a thread of its own. ``text`` is what has arrived; ``error`` is why it ended too early."""

    def __init__(self, url: str, **body: Any):
        super().__init__(daemon=True)
        self.url, self.body = url, {"prompt": "x", "stream": True, **body}
        self.status, self.text, self.error = 0, "", ""
        self.start()

    def run(self) -> None:
        try:
            with httpx.stream("POST", self.url + CHAT, json=self.body, timeout=60) as answer:
                self.status = answer.status_code
                for piece in answer.iter_text():
                    self.text += piece
        except httpx.TransportError as error:
            self.error = type(error).__name__

    @property
    def pids(self) -> set[int]:
        """The servers that answered."""
        events = [json.loads(line[6:]) for line in self.text.split("\n\n") if line.startswith("data: {")]
        return {int(event["choices"][0]["text"]) for event in events if "choices" in event}


def until(condition: Callable[[], Any], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + patient_timeout(seconds)
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


OPTIONS = ("router=exact", "routing=round_robin")


@pytest.mark.parametrize(("signals", "status"), [([2], 130), ([15, 15], 0)])
def test_the_second_signal_ends_at_once(
    start_cluster: START, leftovers: Callable[[], list[str]], signals: list[int], status: int
) -> None:
    cluster = start_cluster(*OPTIONS, "server.drain_timeout=600", fake=True)
    cluster.wait_until_ready()
    request = Request(cluster.url, max_tokens=10_000, delay=0.05)
    until(lambda: request.text)
    for number in signals[:-1]:
        cluster.process.send_signal(number)
        until(lambda: httpx.get(f"{cluster.url}/health").status_code == 503)
    cluster.process.send_signal(signals[-1])
    assert cluster.process.wait(patient_timeout(30)) == status
    request.join(patient_timeout(30))
    assert "[DONE]" not in request.text
    until(lambda: leftovers() == [])


def test_the_drain_timeout(start_cluster: START, leftovers: Callable[[], list[str]]) -> None:
    cluster = start_cluster(*OPTIONS, "server.drain_timeout=0.3", fake=True)
    cluster.wait_until_ready()
    request = Request(cluster.url, max_tokens=10_000, delay=0.05)
    until(lambda: request.text)
    cluster.process.send_signal(signal.SIGTERM)
    assert cluster.process.wait(patient_timeout(30)) == 0
    until(lambda: leftovers() == [])


def test_a_killed_supervisor_leaves_nothing(start_cluster: START, leftovers: Callable[[], list[str]]) -> None:
    cluster = start_cluster(*OPTIONS, fake=True)
    cluster.wait_until_ready()
    assert len(leftovers()) == 3
    cluster.process.kill()
    until(lambda: leftovers() == [])


def test_a_killed_replica_under_load_and_a_drain(start_cluster: START, leftovers: Callable[[], list[str]]) -> None:
    """The streams of the killed replica end with an error, its other requests are retried, and it is back.

    The other requests are untouched. After SIGTERM, open requests finish and new ones are refused.
    """
    cluster = start_cluster(*OPTIONS, "replicas=3", fake=True)
    cluster.wait_until_ready()
    streams = [Request(cluster.url, max_tokens=30, delay=0.3) for _ in range(6)]
    until(lambda: all(request.text for request in streams))
    whole = [Request(cluster.url, max_tokens=30, delay=0.3, stream=False) for _ in range(6)]
    until(lambda: sum(each["open_requests"] for each in cluster.replicas()) == 12)
    victim = cluster.replicas()[1]["pid"]
    os.kill(victim, signal.SIGKILL)
    for request in (*streams, *whole):
        request.join(patient_timeout(60))
        assert (request.status, request.error) == (200, "")
    broken = [request for request in streams if victim in request.pids]
    assert len(broken) == 2
    for request in streams:
        last = request.text.rstrip().rpartition("data: ")[2]
        if request in broken:
            assert json.loads(last)["error"]["type"] == "server_error"
        else:
            assert last == "[DONE]" and request.text.count("choices") == 30
    for request in whole:
        assert str(victim) not in request.text
    found = cluster.wait_for_states("ready", "ready", "ready")
    assert [each["restarts"] for each in found] == [0, 1, 0]
    assert found[1]["pid"] not in (0, victim)
    assert "minisgl_cluster_retries_total 2" in httpx.get(f"{cluster.url}/metrics").text
    requests = [Request(cluster.url, max_tokens=20, delay=0.25) for _ in range(3)]
    until(lambda: all(request.text for request in requests))
    cluster.process.send_signal(signal.SIGTERM)
    until(lambda: httpx.get(f"{cluster.url}/health").status_code == 503)
    assert httpx.post(f"{cluster.url}{CHAT}", json={"prompt": "x"}).status_code == 503
    for request in requests:
        request.join(patient_timeout(30))
        assert request.text.endswith("data: [DONE]\n\n")
        assert request.text.count("choices") == 20
    assert cluster.process.wait(patient_timeout(30)) == 0
    until(lambda: leftovers() == [])


def test_no_replica_starts(start_cluster: START) -> None:
    """The cluster ends with status 1 and the last lines of a replica's log."""
    cluster = start_cluster(*OPTIONS, "restart_limit=1", fake=True, exit=3)
    assert cluster.process.wait(patient_timeout(60)) == 1
    assert "No replica is left" in cluster.log()
    assert "the script says so" in cluster.log()


def test_a_replica_refuses_its_options(start_cluster: START) -> None:
    cluster = start_cluster(*OPTIONS, fake=True, exit=2)
    assert cluster.process.wait(patient_timeout(60)) == 2
    assert cluster.log().splitlines()[-1] == "minisgl.cluster: the script says so"


def test_an_address_in_use(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(SystemExit) as caught:
            main([*OPTIONS, "device=cpu", f"server.port={port}"])
    assert caught.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"minisgl.cluster: server.port={port}: can't listen")
