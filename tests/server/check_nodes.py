"""The longer tests of servers whose ranks torchrun starts: ``make check-nodes`` runs them. They take minutes.

`test_nodes` has the test of the default run. The tests of the connection itself, ``tests/message/test_link.py`` and
``tests/server/test_remote_ranks.py``, need no torchrun.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from minisgl.cluster.process import free_port
from minisgl.testing.nodes import Nodes
from minisgl.testing.serving import scaled_timeout

OPTIONS = ["model=tutor", "num_pages=512", "server.tokenizers=0"]
PROMPT = {"prompt": "What is a KV cache?", "temperature": 0, "max_tokens": 24}
LONG = {"prompt": "a", "max_tokens": 1000, "ignore_eos": True, "stream": True}
THROUGH_PROXY = str(Path(__file__).with_name("torchrun_through_proxy.py"))


def complete(nodes: Nodes) -> str:
    answer = httpx.post(f"{nodes.url}/v1/completions", json=PROMPT, timeout=60).json()
    text: str = answer["choices"][0]["text"]
    return text


class Stream(threading.Thread):
    """A long streamed request. ``lines`` are the lines of the response so far."""

    def __init__(self, nodes: Nodes, **more: Any):
        super().__init__(daemon=True)
        self.url, self.body, self.lines = f"{nodes.url}/v1/completions", LONG | more, [""]
        self.began = threading.Event()
        self.start()
        assert self.began.wait(scaled_timeout(30))

    def run(self) -> None:
        try:
            with httpx.stream("POST", self.url, json=self.body, timeout=60) as answer:
                for line in answer.iter_lines():
                    self.lines.append(line)
                    self.began.set()
        except httpx.TransportError:  # the launcher was killed
            pass
        finally:
            self.began.set()


# ---- the death of a process ---------------------------------------------------------------------------


def follower(nodes: Nodes) -> psutil.Process:
    return nodes.rank(1)


def launcher(nodes: Nodes) -> psutil.Process:
    return nodes.rank(0)


def scheduler(nodes: Nodes) -> psutil.Process:
    return nodes.scheduler()


def agent(node: int) -> Callable[[Nodes], psutil.Process]:
    return lambda nodes: psutil.Process(nodes.agents[node].pid)


@pytest.mark.parametrize("busy", [True, False], ids=["busy", "idle"])
@pytest.mark.parametrize("victim", [follower, launcher, scheduler], ids=lambda victim: victim.__name__)
def test_promise_10_killed_process(victim: Callable[[Nodes], psutil.Process], busy: bool) -> None:
    """kill -9 of a rank ends all processes of all nodes within 5 s, whether a request runs or all ranks wait."""
    with Nodes(*OPTIONS) as nodes:
        stream = Stream(nodes) if busy else None
        nodes.record()
        victim(nodes).kill()
        assert nodes.seconds_until_gone() < scaled_timeout(5)
        if stream is not None:
            stream.join(scaled_timeout(10))
            assert "[DONE]" not in stream.lines[-1]
        assert all(nodes.statuses())
        if victim is not launcher:  # the folder of a killed launcher is removed by its workers
            assert nodes.leftovers() == []


@pytest.mark.parametrize("node", [0, 1])
def test_killed_torchrun(node: int) -> None:
    """When torchrun itself is killed, the server drains: no rank is left without its supervisor."""
    with Nodes(*OPTIONS) as nodes:
        agent(node)(nodes).kill()
        assert nodes.seconds_until_gone() < scaled_timeout(30)
        assert nodes.leftovers() == []


def test_promise_10_stopped_process() -> None:
    """A rank that is stopped is silent, as behind a cut link: rank 0 ends within 10 s, though a collective hangs."""
    with Nodes(*OPTIONS) as nodes:
        stream = Stream(nodes)
        stopped = nodes.rank(1)
        stopped.suspend()
        began = time.monotonic()
        rest = [stopped, psutil.Process(nodes.agents[1].pid)]
        nodes.seconds_until_gone(but=rest)
        assert 5.0 < time.monotonic() - began < scaled_timeout(10)
        stream.join(scaled_timeout(10))
        assert "no sign of life" in "".join(stream.lines)
        stopped.resume()
        assert nodes.seconds_until_gone() < scaled_timeout(5)
        assert nodes.leftovers() == []


# ---- the link -------------------------------------------------------------------------------------------


@contextmanager
def behind_proxy(**env: str) -> Iterator[tuple[Nodes, Callable[[str], None]]]:
    """Yield two nodes whose ranks are connected through a proxy, and a function that sends it a command."""
    with Nodes(*OPTIONS, program=[THROUGH_PROXY], env=env) as nodes:
        control = nodes.folder / "proxy"

        def command(text: str) -> None:
            (nodes.folder / "next").write_text(text)
            os.replace(nodes.folder / "next", control)
            time.sleep(0.2)

        yield nodes, command


@pytest.mark.parametrize("busy", [True, False], ids=["busy", "idle"])
@pytest.mark.parametrize("directions", ["up down", "up", "down"])
def test_promise_10_cut_link(directions: str, busy: bool) -> None:
    """A link that is cut ends all processes on both sides within 10 s, in each direction, idle and under load."""
    with behind_proxy() as (nodes, command):
        if busy:
            Stream(nodes)
        nodes.record()
        command(f"cut {directions}")
        assert nodes.seconds_until_gone() < scaled_timeout(10)
        assert "no sign of life" in nodes.log()
        assert nodes.statuses() == [1, 1] and nodes.leftovers() == []


def test_slow_link() -> None:
    """A link with 300 ms of delay is slow, but works."""
    with behind_proxy() as (nodes, command):
        expected = complete(nodes)
        command("delay 0.3")
        assert complete(nodes) == expected
        time.sleep(8)  # longer than the silence after which a rank counts as gone
        assert complete(nodes) == expected


def test_lossy_link() -> None:
    """A frame that is lost on the way ends the server: it never computes with a step too few."""
    with behind_proxy() as (nodes, command):
        Stream(nodes)
        nodes.record()
        command("lose down 1")
        assert nodes.seconds_until_gone() < scaled_timeout(10)
        assert "rank 0: frame" in nodes.log(1) or "rank 0: a frame" in nodes.log(1)


# ---- the start ------------------------------------------------------------------------------------------


def failed_start(*options: str, **more: Any) -> tuple[list[int], Nodes]:
    """Start nodes that can't start together. Return their exit statuses, and the nodes, which have ended."""
    with Nodes(*OPTIONS, "multi_node.connect_timeout=15", *options, wait=False, **more) as nodes:
        statuses = nodes.statuses()
        nodes.text = nodes.log()  # type: ignore[attr-defined]
        nodes.texts = [nodes.log(node) for node in range(len(nodes.agents))]  # type: ignore[attr-defined]
        assert nodes.leftovers() == []
    return statuses, nodes


def test_wrong_secret(tmp_path: Path) -> None:
    """A rank with another secret says so and ends. Rank 0 logs the attempt, and waits until the time is over."""
    other = tmp_path / "other"
    other.write_text("0123456789abcdef")
    other.chmod(0o600)
    statuses, nodes = failed_start(own_options={1: [f"multi_node.secret_file={other}"]})
    assert all(statuses)
    log, own = nodes.texts  # type: ignore[attr-defined]
    assert f"minisgl: multi_node.secret_file={other}: rank 0 has another secret" in own
    assert "refused a connection from 127.0.0.1" in log and "no connection of rank 1" in log
    assert "0123456789abcdef" not in log + own


def test_different_options() -> None:
    """Ranks with different options do not start, and both sides say which options differ."""
    statuses, nodes = failed_start(own_options={1: ["page_size=32"]})
    assert all(statuses)
    for text in nodes.texts:  # type: ignore[attr-defined]
        assert "page_size=32 (rank 0: 16)" in text


@pytest.mark.parametrize(
    ("options", "torchrun", "expected"),
    [
        (["tp=4"], [], "minisgl: tp=4, but torchrun starts 2 ranks (WORLD_SIZE=2): leave tp out."),
        ([], ["--max-restarts", "1"], "minisgl: --max-restarts=1: minisgl can't be restarted"),
        (["multi_node.interface=none0"], [], "minisgl: multi_node.interface=none0: this machine has no such"),
        (["model=no-such-model"], [], "no-such-model"),
    ],
)
def test_wrong_options(options: list[str], torchrun: list[str], expected: str) -> None:
    statuses, nodes = failed_start(*options, torchrun=torchrun)
    assert all(statuses)
    assert expected in nodes.text  # type: ignore[attr-defined]
    assert "minisgl/" not in "".join(  # no traceback of minisgl
        line
        for line in nodes.text.splitlines()
        if line.startswith("  File")  # type: ignore[attr-defined]
    )


def test_death_during_the_start() -> None:
    """A rank that is killed while it loads the model ends the others, which wait for it in the rendezvous."""
    with Nodes(*OPTIONS, wait=False) as nodes:
        deadline = time.monotonic() + scaled_timeout(60)
        while "has connected" not in nodes.log(0):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        nodes.record()
        nodes.rank(1).kill()
        assert nodes.seconds_until_gone() < scaled_timeout(5)
        assert nodes.leftovers() == []


# ---- the end, and other shapes -----------------------------------------------------------------------------


@pytest.mark.parametrize("to", [[0], [1], [0, 1]])
def test_promise_10_sigterm_drains(to: list[int]) -> None:
    """SIGTERM for the torchrun command of any node, or all, lets open requests finish. Then all processes end."""
    with Nodes(*OPTIONS) as nodes:
        stream = Stream(nodes, max_tokens=100)
        for node in to:
            nodes.agents[node].send_signal(signal.SIGTERM)
        nodes.seconds_until_gone()
        stream.join(scaled_timeout(10))
        assert "data: [DONE]" in stream.lines
        assert all(nodes.statuses())  # with 0, torchrun would wait for a node that has ended
        assert nodes.leftovers() == []
        assert "CRITICAL" not in nodes.log() and " ERROR " not in nodes.log()


def test_two_ranks_on_a_node() -> None:
    """One torchrun command with two ranks (``--nproc-per-node 2``): a clean end after SIGINT and no leftovers."""
    with Nodes(*OPTIONS, count=1, per_node=2) as nodes:
        assert "KV cache" in complete(nodes)
        nodes.agents[0].send_signal(signal.SIGINT)
        assert nodes.seconds_until_gone() < scaled_timeout(10)
        assert nodes.leftovers() == []


def test_c10d_rendezvous() -> None:
    """torchrun's other rendezvous, which chooses the node of rank 0 itself."""
    endpoint = f"127.0.0.1:{free_port()}"
    words = ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", "7", "--local-addr", "127.0.0.1"]
    with Nodes(*OPTIONS, torchrun=words, wait=False) as nodes:
        deadline = time.monotonic() + scaled_timeout(90)
        while not (ready := [n for n in (0, 1) if "minisgl is ready" in nodes.output(n)]):
            assert time.monotonic() < deadline and not any(agent.poll() for agent in nodes.agents), nodes.log()
            time.sleep(0.1)
        nodes.url = nodes.output(ready[0]).split()[-1]
        nodes.record()
        assert "KV cache" in complete(nodes)
        nodes.terminate()
        nodes.seconds_until_gone()
        assert nodes.leftovers() == []


# ---- two network namespaces -----------------------------------------------------------------------------


def namespaces_reason() -> str:
    """Return why this machine can't make network namespaces, or "" if it can."""
    if shutil.which("ip") is None:
        return "the command ip is not installed"
    made = subprocess.run(["ip", "netns", "add", f"minisgl-{os.getpid()}"], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"no network namespace can be made: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "delete", f"minisgl-{os.getpid()}"], check=True)
    return ""


@contextmanager
def two_namespaces() -> Iterator[list[str]]:
    """Yield the names of two network namespaces, connected by the interfaces ``mini0``: 10.99.0.1 and 10.99.0.2."""
    names = [f"minisgl-{os.getpid()}-{i}" for i in (0, 1)]
    try:
        for name in names:
            subprocess.run(["ip", "netns", "add", name], check=True)
        link = [
            "ip",
            "-n",
            names[0],
            "link",
            "add",
            "mini0",
            "type",
            "veth",
            "peer",
            "name",
            "mini0",
            "netns",
            names[1],
        ]
        subprocess.run(link, check=True)
        for i, name in enumerate(names):
            subprocess.run(["ip", "-n", name, "addr", "add", f"10.99.0.{i + 1}/24", "dev", "mini0"], check=True)
            for interface in ("lo", "mini0"):
                subprocess.run(["ip", "-n", name, "link", "set", interface, "up"], check=True)
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False)


def test_two_network_namespaces() -> None:
    """Two nodes with networks of their own, as two machines have. A cable that is pulled ends both within 10 s."""
    if reason := namespaces_reason():
        pytest.skip(reason)
    with two_namespaces() as names:
        inside = [["ip", "netns", "exec", name] for name in names]
        with Nodes(*OPTIONS, prefixes=inside, master="10.99.0.1", interface="mini0") as nodes:
            curl = [*inside[0], "curl", "-s", f"{nodes.url}/v1/completions", "-H", "Content-Type: application/json"]
            curl += ["-d", json.dumps(PROMPT)]
            answer = json.loads(subprocess.run(curl, capture_output=True, check=True, timeout=300).stdout)
            assert "KV cache" in answer["choices"][0]["text"]
            log = nodes.log(0)
            assert "waiting for 1 ranks at 10.99.0.1:" in log and "rank 1 (10.99.0.2) has connected" in log
            subprocess.run(["ip", "-n", names[1], "link", "set", "mini0", "down"], check=True)
            assert nodes.seconds_until_gone() < scaled_timeout(10)
            assert "no sign of life" in nodes.log(0) and "no sign of life" in nodes.log(1)
            assert nodes.leftovers() == []
