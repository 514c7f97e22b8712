"""Promise 10: what a server does when one of its processes dies, when it is told to end, and what it leaves behind."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from minisgl.testing.serving import Server, patience

LONG = {"prompt": [5, 6, 7], "max_tokens": 8000, "ignore_eos": True}
LINUX = os.path.isdir("/proc/self/fd")
needs_proc = pytest.mark.skipif(not LINUX, reason="reads /proc, which only Linux has")


class Request(threading.Thread):
    """A request that runs for long, in a thread: what it got, and when that ended."""

    def __init__(self, server: Server, stream: bool, **more: Any):
        super().__init__(daemon=True)
        self.server, self.stream = server, stream
        self.body = {**LONG, "stream": stream, **more}
        self.status, self.text, self.ended = 0, "", 0.0
        self.began = threading.Event()
        self.start()

    def run(self) -> None:
        try:
            with httpx.stream(
                "POST", f"{self.server.url}/v1/completions", json=self.body, timeout=httpx.Timeout(60)
            ) as answer:
                self.status = answer.status_code
                for piece in answer.iter_text():
                    self.text += piece
                    self.began.set()
        except httpx.TransportError:  # the launcher was killed
            pass
        finally:
            self.ended = time.monotonic()
            self.began.set()

    def error(self) -> dict[str, Any]:
        """The error that it ended with: as its body, or as the last event of its stream."""
        if not self.stream:
            return json.loads(self.text)["error"]
        events = [event for event in self.text.split("\n\n") if event]
        assert "[DONE]" not in events[-1]
        return json.loads(events[-1].removeprefix("data: "))["error"]


def wait_for(condition: Any, timeout: float) -> bool:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return bool(condition())


def running(server: Server, count: int, **more: Any) -> list[Request]:
    """Requests in the middle of their work; every other one streams."""
    requests = [Request(server, stream=i % 2 == 0, **more) for i in range(count)]
    for request in requests[::2]:
        assert request.began.wait(patience(30))
    assert wait_for(lambda: server.metrics()["minisgl_scheduler_running"] == count, patience(20))
    return requests


def health(server: Server) -> int:
    return httpx.get(f"{server.url}/health", timeout=5).status_code


@pytest.mark.parametrize(
    ("tp", "victim"),
    [
        (1, "scheduler-0"),
        (1, "detokenizer"),
        (1, "tokenizer-0"),
        (2, "scheduler-0"),
        (2, "scheduler-1"),
    ],
)
def test_promise_10_a_dead_worker_ends_the_server(tiny: Path, tp: int, victim: str) -> None:
    with Server(f"model={tiny}", f"tp={tp}", "num_pages=2048") as server:
        requests = running(server, 6)
        server.look()
        assert any("minisgl" in thing for thing in server.things)
        workers = server.workers()
        assert set(workers) == {"api", "detokenizer", "tokenizer-0", *(f"scheduler-{i}" for i in range(tp))}
        died = time.monotonic()
        os.kill(workers[victim], signal.SIGKILL)
        statuses = []
        # Each over a connection of its own, as anybody's is; but a new client costs a tenth of a second.
        with httpx.Client(timeout=5, headers={"Connection": "close"}) as client:
            while server.process.poll() is None and time.monotonic() < died + patience(10):
                try:
                    statuses.append((time.monotonic() - died, client.get(f"{server.url}/health").status_code))
                except httpx.TransportError:
                    break
                time.sleep(0.02)
        assert server.wait(patience(5)) == 1
        for request in requests:
            request.join(patience(5))
            assert request.ended - died < patience(2.0)
            error = request.error()
            assert victim in error["message"]
            assert error["type"] == "server_error"
            assert request.status == (200 if request.stream else 500)
        sick = [when for when, status in statuses if status == 503]
        assert sick, statuses
        assert sick[0] < patience(1.0)
        assert max(sick) - sick[0] > 0.8
        assert all(status == 503 for when, status in statuses if when >= sick[0])
        assert wait_for(lambda: not server.left(), patience(1.0)), server.left()
        assert f"minisgl: {victim} died: it was killed by SIGKILL\n" in server.log()
        assert "Traceback" not in server.log()


@pytest.mark.parametrize("tp", [1, 2])
def test_promise_10_a_dead_launcher_takes_its_workers_along(tiny: Path, tp: int) -> None:
    with Server(f"model={tiny}", f"tp={tp}", "num_pages=2048") as server:
        requests = running(server, 4)
        server.look()
        assert len(server.family) >= 3 + tp
        os.kill(server.process.pid, signal.SIGKILL)
        died = time.monotonic()
        assert server.wait(patience(5)) == -signal.SIGKILL
        assert wait_for(lambda: not server.left(), patience(2.0)), server.left()
        assert time.monotonic() - died < patience(2.0)
        for request in requests:
            request.join(patience(5))
            assert not request.is_alive()


def test_promise_10_sigterm_drains(tiny: Path) -> None:
    with Server(f"model={tiny}", "num_pages=2048") as server:
        requests = running(server, 4, max_tokens=1500, temperature=0, return_token_ids=True)
        server.process.send_signal(signal.SIGTERM)
        assert wait_for(lambda: health(server) == 503, patience(1.0))
        late = httpx.post(f"{server.url}/v1/completions", json=LONG, timeout=10)
        assert late.status_code == 503
        assert "shutting down" in late.json()["error"]["message"]
        assert server.wait(patience(30)) == 0
        for request in requests:
            request.join(patience(5))
            assert request.status == 200
            if request.stream:
                assert request.text.endswith("data: [DONE]\n\n")
            else:
                assert json.loads(request.text)["usage"]["completion_tokens"] == 1500
        assert wait_for(lambda: not server.left(), patience(1.0)), server.left()


def test_promise_10_draining_is_bounded(tiny: Path) -> None:
    with Server(f"model={tiny}", "num_pages=2048", "server.drain_timeout=0.5") as server:
        requests = running(server, 2)
        server.process.send_signal(signal.SIGTERM)
        asked = time.monotonic()
        assert server.wait(patience(10)) == 0
        assert time.monotonic() - asked < patience(3.0)
        for request in requests:
            request.join(patience(5))
            assert "too long" in request.error()["message"]
        assert wait_for(lambda: not server.left(), patience(1.0)), server.left()


@pytest.mark.parametrize("tp", [1, 2])
def test_promise_10_sigint_ends_at_once(tiny: Path, tp: int) -> None:
    with Server(f"model={tiny}", f"tp={tp}", "num_pages=2048") as server:
        requests = running(server, 2)
        asked = time.monotonic()
        os.killpg(server.process.pid, signal.SIGINT)  # as a keyboard does: to every process of the group
        assert server.wait(patience(5)) == 128 + signal.SIGINT
        assert time.monotonic() - asked < patience(3.0)
        for request in requests:
            request.join(patience(5))
            assert "shutting down" in request.error()["message"]
        assert wait_for(lambda: not server.left(), patience(1.0)), server.left()
        assert "Traceback" not in server.log()


@pytest.mark.parametrize("after", [0.3, 0.8, 1.5])
def test_promise_10_sigint_while_it_starts(tiny: Path, after: float) -> None:
    with Server(f"model={tiny}", "num_pages=64", wait=False) as server:
        time.sleep(after)
        server.look()
        os.killpg(server.process.pid, signal.SIGINT)
        assert server.wait(patience(3)) in (128 + signal.SIGINT, -signal.SIGINT)
        assert wait_for(lambda: not server.left(), patience(1.0)), server.left()


FAULTY = """
from dataclasses import dataclass

from minisgl import hookimpl
from minisgl.scheduler import Plan


@dataclass
class Faulty:
    after: int = 20


class Policy:
    def __init__(self, after):
        self.left = after

    def plan(self, waiting, running, budget):
        self.left -= 1
        if self.left < 0:
            raise KeyError("the student's mistake")
        return Plan([(w.uid, n) for w in waiting if (n := budget.grant(w, 9))] + [(r.uid, 1) for r in running])


@hookimpl
def minisgl_configs():
    yield "scheduler", "faulty", Faulty


@hookimpl
def minisgl_scheduler(config):
    if isinstance(config, Faulty):
        return Policy(config.after)
"""


def test_promise_10_a_plugin_that_raises_is_named_to_everybody(tiny: Path, tmp_path: Path) -> None:
    plugin = tmp_path / "faulty.py"
    plugin.write_text(FAULTY)
    with Server(f"model={tiny}", "num_pages=2048", f"plugins={plugin}", "scheduler=faulty") as server:
        requests = [Request(server, stream=stream) for stream in (True, False)]
        for request in requests:
            request.join(patience(20))
            assert 'scheduler-0 died: KeyError: "the student\'s mistake"' in request.error()["message"]
        assert server.wait(patience(5)) == 1
        assert f'File "{plugin}", line' in server.log()  # the whole traceback is there, once
        assert server.log().count("Traceback") == 1
        assert wait_for(lambda: not server.left(), patience(1.0)), server.left()


SLOW = """
import time
from dataclasses import dataclass

from minisgl import hookimpl
from minisgl.scheduler import Plan


@dataclass
class Slow:
    nap: float = 0.5
    fast: int = 0


class Policy:
    def __init__(self, config):
        self.nap, self.fast = config.nap, config.fast

    def plan(self, waiting, running, budget):
        self.fast -= 1
        if self.fast < 0:
            time.sleep(self.nap)
        return Plan([(w.uid, n) for w in waiting if (n := budget.grant(w, 9))] + [(r.uid, 1) for r in running])


@hookimpl
def minisgl_configs():
    yield "scheduler", "slow", Slow


@hookimpl
def minisgl_scheduler(config):
    if isinstance(config, Slow):
        return Policy(config)
"""


@pytest.fixture
def slow(tiny: Path, tmp_path: Path) -> list[str]:
    """The options of a server whose policy sleeps, and whose watchdog has two seconds of patience."""
    plugin = tmp_path / "slow.py"
    plugin.write_text(SLOW)
    return [f"model={tiny}", "num_pages=2048", f"plugins={plugin}", "scheduler=slow", "server.watchdog=2"]


def test_promise_10_a_scheduler_that_hangs_is_a_dead_one(slow: list[str]) -> None:
    with Server(*slow, "tp=2", "scheduler.nap=1000", "scheduler.fast=20") as server:
        began = time.monotonic()
        requests = [Request(server, stream=stream) for stream in (True, False)]
        assert requests[0].began.wait(patience(10))
        for request in requests:
            request.join(patience(10))
            error = request.error()["message"]
            assert "scheduler-0 died: it was stuck in one step for 2 s" in error
            assert "server.watchdog=2" in error
        assert requests[0].ended - began >= 2.0
        assert health(server) == 503
        assert server.wait(patience(5)) == 1
        assert "minisgl: scheduler-0 died: it was stuck in one step for 2 s" in server.log()
        assert re.search(r'slow.py", line \d+ in plan\n', server.log()), "the log says where it hung"
        assert server.log().count(" is here:\n") == 2  # all ranks: the guilty one may be another than the leader
        assert wait_for(lambda: not server.left(), patience(1.0)), server.left()


def test_promise_10_a_tokenizer_that_hangs_is_a_dead_one(tiny: Path, tmp_path: Path) -> None:
    """In a chat template without an end."""
    model = tmp_path / "model"
    shutil.copytree(tiny, model)
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    (model / "chat_template.jinja").write_text(endless)
    with Server(f"model={model}", "num_pages=64", "server.tokenizers=2", "server.watchdog=2") as server:
        body = {"messages": [{"role": "user", "content": "hi"}]}
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=30)
        assert answer.status_code == 500
        assert re.search(r"tokenizer-\d died: it was stuck in one message for 2 s", answer.json()["error"]["message"])
        assert server.wait(patience(5)) == 1
        assert server.log().count(" is here:\n") == 1
        assert "template" in server.log(), "the log says where it hung"
        assert wait_for(lambda: not server.left(), patience(1.0)), server.left()


def test_promise_10_a_slow_scheduler_and_an_idle_one_are_left_alone(slow: list[str]) -> None:
    with Server(*slow) as server:
        Request(server, stream=True, max_tokens=1).join(patience(10))
        time.sleep(2.4)
        assert health(server) == 200
        request = Request(server, stream=True, max_tokens=5)
        assert request.began.wait(patience(10))
        server.process.send_signal(signal.SIGTERM)
        request.join(patience(20))
        assert request.text.endswith("data: [DONE]\n\n")
        assert server.wait(patience(5)) == 0
        assert server.log() == ""


def test_a_warm_start_takes_few_seconds(tutor: Server) -> None:
    """At most 5 s for tutor (DESIGN 2), counted as what all its processes computed: other tests may run beside it,
    and alone it takes less time than that, since the processes start side by side."""
    spent = 0.0
    with Server("model=tutor") as server:
        for process in server.family:
            times = process.cpu_times()
            spent += times.user + times.system
    assert spent < 5.0


@needs_proc
def test_light_processes_import_no_torch(tutor: Server) -> None:
    for role, pid in tutor.workers().items():
        maps = Path(f"/proc/{pid}/maps").read_text()
        assert ("libtorch" in maps) is role.startswith("scheduler"), role


def test_a_worker_that_dies_while_the_server_starts(tiny: Path) -> None:
    with Server(f"model={tiny}", "num_pages=64", wait=False) as server:
        launcher = psutil.Process(server.process.pid)
        assert wait_for(lambda: len(launcher.children()) >= 4, patience(20))  # three workers and a resource tracker
        victim = next(p for p in launcher.children() if "spawn_main" in " ".join(p.cmdline()))
        victim.kill()
        assert server.wait(patience(10)) == 1
        assert "could not start: it was killed by SIGKILL" in server.log()
        assert "Traceback" not in server.log()


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "minisgl", "device=cpu", *words], capture_output=True, text=True, timeout=60
    )


def test_wrong_options_end_with_one_message_and_status_2(tiny: Path, tutor: Server, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in tiny.iterdir():
        (broken / file.name).symlink_to(file)
    (broken / "model.safetensors").unlink()
    (broken / "model.safetensors").write_bytes(b"no weights")
    words = tmp_path / "words"
    words.mkdir()
    for file in tiny.iterdir():
        (words / file.name).symlink_to(file)
    (words / "tokenizer.json").unlink()
    (words / "tokenizer.json").write_text("{}")
    port = tutor.url.rpartition(":")[2]
    for word, said in {
        f"model={empty}": "config.json",
        f"model={broken}": "model.safetensors",
        f"model={words}": "tokenizer.json",
        f"server.port={port}": f"can't listen on 127.0.0.1:{port}",
        "server.host=no.such.host.invalid": "no.such.host.invalid",
    }.items():
        ended = run("server.port=0", "num_pages=64", word)
        assert ended.returncode == 2, (word, ended.stderr)
        lines = [line for line in ended.stderr.splitlines() if line]
        assert len(lines) == 1, ended.stderr
        assert lines[0].startswith("minisgl: ")
        assert said in lines[0]
        assert ended.stdout == ""
