"""``POST /live/what-if``: the recorded run of a server goes on in the simulated engine, as it was or otherwise."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pluggy
import psutil
import pytest

from minisgl import hooks
from minisgl.core import EngineSpec, SamplingParams
from minisgl.message import Call, Message
from minisgl.message.link import Link
from minisgl.options.compose import compose
from minisgl.plugin_manager.manager import PluginManager
from minisgl.plugins.live.view.extension import Recording
from minisgl.plugins.live.view.futures import MAX_BYTES, Question, answer
from minisgl.plugins.live.view.kept import Held, Tokens, fill_in, without_waits
from minisgl.plugins.live.view.observer import MAX_BEHIND, TOPIC, LiveObserver, Pace
from minisgl.testing.drive import Drive, Job, make_plugin
from minisgl.testing.serving import Server, patient_timeout
from minisgl.trace import events as ev
from minisgl.trace.read import TraceError

from .test_server import Viewer, chat, watching

TWO_HANDBOOKS = ("Wash the vegetables. Keep the knife sharp. ", "Check the wind. Keep the lines coiled. ")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server("model=tutor", "num_pages=96", "max_running_requests=4") as started:
        yield started


@pytest.fixture(scope="module")
def viewer(server: Server) -> Iterator[Viewer]:
    """Watch a server from its first request on, which then gets requests that share prefixes."""
    with watching(server.url) as watcher:
        assert not watcher.wait("now")["added"]
        load(server.url, 10)
        yield watcher


def load(url: str, count: int) -> None:
    def ask(i: int) -> None:
        assert chat(url, f"{6 * TWO_HANDBOOKS[i % 2]} Question {i}?", max_tokens=16).status_code == 200

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(patient_timeout(120))


def ask(server: Server, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/live/what-if", json=body, timeout=patient_timeout(200))


def test_same_options_repeat_the_live_run(server: Server, viewer: Viewer) -> None:
    """The token ids that the page does not get are in the repetition: it finds the same prefixes in the cache."""
    found = ask(server, at=3).json()
    assert found["first"] is None, found
    assert found["misses"] is None
    assert found["notes"][0] == "The steps are the same."
    assert found["was"] == found["would"]
    assert all(was == would for _, was, would, _ in found["rows"])  # the times too, to the last digit
    share = next(row for row in found["rows"] if row[0] == "prompt tokens from the cache")
    assert share[1] == share[2] != "0 (0 %)"
    assert all(set(event.get("prompt_ids", [0])) == {0} for event in viewer.events)


def test_another_policy_and_another_pool(server: Server, viewer: Viewer) -> None:
    found = ask(server, at=2, scheduler="mixed", max_prefill_tokens=16).json()
    assert found["overrides"] == ["scheduler=mixed", "max_prefill_tokens=16"]
    assert not found["restarted"]
    first = found["first"]
    was, would = ({step["s"]: step["rows"] for step in found[name]} for name in ("was", "would"))
    assert was[first] != would[first]
    assert all(was[step] == would[step] for step in was if step < first)
    smaller = ask(server, at=8, num_pages=32, cache="naive").json()
    assert smaller["restarted"]
    assert smaller["first"] >= 8
    assert smaller["was"][0] == smaller["would"][0]
    assert next(row for row in smaller["rows"] if row[0] == "prompt tokens from the cache")[2] == "0 (0 %)"
    assert smaller["counts"]["would"]["computed"] > smaller["counts"]["was"]["computed"]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"at": 0, "num_pages": 0}, "num_pages"),
        ({"at": 0, "page_size": 1 << 20}, "page_size"),
        ({"at": 0, "scheduler": "../../evil"}, "scheduler"),
        ({"at": 0, "plugins": "evil.py"}, "plugins"),
        ({"scheduler": "mixed"}, "at"),
    ],
)
def test_wrong_options(server: Server, viewer: Viewer, body: dict[str, Any], field: str) -> None:
    refused = ask(server, **body)
    assert refused.status_code == 400
    assert field in refused.text


def test_what_is_missing_is_said(server: Server, viewer: Viewer) -> None:
    assert "has the steps 0 to" in ask(server, at=1_000_000).json()["error"]
    assert "nonsense" in ask(server, at=0, scheduler="nonsense").json()["error"]
    small = ask(server, at=0, num_pages=2).json()["error"]
    assert "A KV pool of 2 pages of 16 tokens is too small: request " in small
    assert "Choose a larger pool" in small


def test_a_page_that_was_opened_late() -> None:
    """A recording that begins between two requests is repeated too: the cache gets its prefixes first."""
    with Server("model=tutor", "num_pages=96", "max_running_requests=4") as server:
        load(server.url, 3)
        assert ask(server, at=0).status_code == 409
        with watching(server.url) as viewer:
            first = viewer.wait("now")["step"]
            assert first > 0
            load(server.url, 6)
            found = ask(server, at=first).json()
            assert found["notes"][0] == "The steps are the same.", found
            assert "has the steps" in ask(server, at=0).json()["error"]


def test_without_control() -> None:
    with Server("model=tutor", "num_pages=64", "live.control=false") as server, watching(server.url):
        assert ask(server, at=0).status_code == 403


def test_a_client_that_leaves_ends_the_simulation(server: Server, viewer: Viewer) -> None:
    """The child process is gone soon after its client, even if it would never have ended."""
    host, port = server.url.removeprefix("http://").split(":")
    body = b'{"at": 0}'
    with socket.create_connection((host, int(port))) as client:
        client.sendall(
            f"POST /live/what-if HTTP/1.1\r\nhost: {host}:{port}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n\r\n".encode()
            + body
        )
        # Only of this server: other tests may ask other servers at the same time.
        family = psutil.Process(server.process.pid)
        child = until(lambda: next((p.pid for p in family.children(recursive=True) if simulates(p.pid)), 0))
        os.kill(child, signal.SIGSTOP)
    until(lambda: not simulates(child))
    assert ask(server, at=3).json()["misses"] is None


def simulates(pid: int) -> bool:
    """Return whether a process answers a what-if."""
    try:
        return b"live.view.futures" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def until(condition: Callable[[], Any]) -> Any:
    end = time.monotonic() + patient_timeout(30)
    while not (value := condition()):
        assert time.monotonic() < end
        time.sleep(0.005)
    return value


@pytest.fixture(scope="module")
def after_a_loss() -> Question:
    """Record a run of which the API server read nothing for a while: the pages then hold other tokens than before."""
    spec = EngineSpec(page_size=4, num_pages=40, max_running_requests=5, max_seq_len=120, vocab_size=40)
    values = {"max_prefill_tokens": 64, "overlap": True, "starvation_steps": 64}
    words = ["page_size=4", "num_pages=40", "max_running_requests=5", "scheduler=mixed", "cache=radix"]
    words += [f"{name}={str(value).lower()}" for name, value in values.items()]
    config = compose(PluginManager.load(), words)
    recording, frames = Recording(), list[tuple[bytes, bytes]]()

    def receive(message: Message) -> None:
        assert isinstance(message, Call)
        first, _, data = message.arguments[1].partition(b"\n")
        frames.append((first[:1], data))

    link = Link(receive)
    observer = LiveObserver(config, spec, link, text=False, delay=0.0)
    manager = pluggy.PluginManager(hooks.PROJECT)
    manager.add_hookspecs(hooks)
    manager.register(observer)

    def tell(**command: Any) -> None:
        link.receivers[TOPIC](msgspec.json.encode(command))

    def pass_on() -> bytes:
        """Read the observer's messages as the API server does. Return their kinds."""
        tell(do="read", number=observer._sent)
        for kind, data in frames:
            recording.take(kind, data)
        kinds = b"".join(kind for kind, _ in frames)
        frames.clear()
        return kinds

    drive = Drive(
        spec, make_plugin("cache", "radix", page_size=4), make_plugin("scheduler", "mixed"),
        observers=manager.hook, thorough=False, **values,
    )  # fmt: skip
    uid = 0

    def serve(stem: int, requests: int) -> None:
        nonlocal uid
        for _ in range(requests):
            uid += 1
            drive.add(Job(uid, [stem] * 20 + [uid % 40] * 6, SamplingParams(max_tokens=12, seed=uid)))
        while drive.scheduler.has_work:
            drive.step()
            observer._flush()

    serve(1, 4)
    tell(do="now")
    pass_on()
    for stem in range(2, 8):
        serve(stem, 8)
    assert observer._lost
    assert len(frames) > MAX_BEHIND
    pass_on()
    serve(8, 1)
    assert b"l" in pass_on()
    assert not recording.parts
    tell(do="now")
    serve(8, 6)
    pass_on()
    tell(do="tokens")
    (_, tokens) = frames[-1]
    lines = b"\n".join(recording.parts)
    first = msgspec.json.decode(recording.parts[0].splitlines()[1])["step"]
    return Question(lines, tokens, first, [])


def test_after_lost_events_a_recording_has_its_own_tokens(after_a_loss: Question) -> None:
    """Without the tokens that the pages had before, the repetition finds the prefixes that the run found."""
    found = answer(after_a_loss)
    assert found.get("error") is None
    assert (found["misses"], found["first"]) == (None, None)
    share = next(row for row in found["rows"] if row[0] == "prompt tokens from the cache")
    assert share[1] == share[2] not in ("0 (0 %)", "–")


def test_missing_tokens_are_named() -> None:
    with pytest.raises(TraceError, match="lacks the token ids of request 7"):
        fill_in([ev.Add(0, 7, 0.0, [0, 0], 4)], Tokens({}, {}, {}, True))


def test_waits_of_the_pace_are_left_out() -> None:
    """An event after a wait comes earlier by it, and one within the wait comes at its beginning."""
    events = [ev.Add(0, uid, t, [0], 4) for uid, t in enumerate((1.0, 2.5, 3.0, 4.0, 9.0))]
    without_waits(events, [Held(1, 8.0, 8.5), Held(0, 2.0, 3.0)])
    assert [event.t for event in events] == [1.0, 2.0, 2.0, 3.0, 7.5]
    pace = Pace(0.0)
    pace.paused = True
    assert pace.hold() == float("inf")
    pace.paused = False
    assert pace.hold() == 0.0
    held = pace.launched()
    assert held is not None
    assert held[0] <= held[1]
    assert pace.launched() is None


def test_the_limit_of_memory_holds(after_a_loss: Question) -> None:
    """A child whose libraries reserve much answers without torch, and then gets no more memory than the limit."""
    program = f"""
import mmap, sys
reserved = mmap.mmap(-1, {2 * MAX_BYTES}, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)
from minisgl.plugins.live.view.futures import main
main()
assert "torch._C" not in sys.modules
try:
    more = mmap.mmap(-1, {MAX_BYTES}, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)
except (OSError, MemoryError):
    print("refused", file=sys.stderr)
"""
    ran = subprocess.run(
        [sys.executable, "-c", program], input=msgspec.msgpack.encode(after_a_loss), capture_output=True, check=True
    )
    assert msgspec.json.decode(ran.stdout)["misses"] is None
    assert b"refused" in ran.stderr
