"""The live view of a real server: who gets the page and the events, what they contain, and slow motion."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from minisgl.config import Config, ConfigError
from minisgl.plugins.http import HttpConfig
from minisgl.plugins.live.auto import Auto
from minisgl.plugins.live.off import Off
from minisgl.plugins.live.on import On
from minisgl.plugins.live.view.extension import MAX_WAITING, Live, _Page
from minisgl.testing.serving import Server, patient_timeout
from minisgl.trace.check import check
from minisgl.trace.read import read

HTML = {"accept": "text/html,application/xhtml+xml"}
KEY = "a secret key"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server("model=tutor", "num_pages=64", "max_running_requests=4") as started:
        yield started


@pytest.fixture(scope="module")
def locked() -> Iterator[Server]:
    """Start a server with a key, whose pages see all text, and may not slow it down."""
    options = ("live=on", "live.text=true", "live.control=false", f"server.api_key='{KEY}'")
    with Server("model=tutor", "num_pages=64", *options) as started:
        yield started


class Viewer(threading.Thread):
    """Reads the events of a server, until it is closed."""

    def __init__(self, url: str, path: str, headers: dict[str, str]):
        super().__init__(daemon=True)
        self.lines: list[str] = []
        self._more = threading.Condition()
        self._connection = http.client.HTTPConnection(url.removeprefix("http://"))
        self._connection.request("GET", path, headers=headers)
        self._socket = self._connection.sock
        self.start()

    def run(self) -> None:
        with self._connection.getresponse() as response, contextlib.suppress(OSError, http.client.HTTPException):
            for line in response:
                if line.startswith(b"data: "):
                    with self._more:
                        self.lines.append(line.decode().removeprefix("data: ").strip())
                        self._more.notify_all()

    @property
    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in list(self.lines)]

    def wait(self, kind: str, **fields: Any) -> dict[str, Any]:
        """Wait for an event of this kind with these fields, and return the last one."""

        def found() -> dict[str, Any] | None:
            fits = (e for e in reversed(self.events) if e["event"] == kind and fields.items() <= e.items())
            return next(fits, None)

        with self._more:
            assert self._more.wait_for(found, patient_timeout(30)), f"no event {kind} {fields} in {self.lines[-5:]}"
        event = found()
        assert event is not None
        return event

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self.join()
        self._connection.close()


@contextmanager
def watching(url: str, query: str = "", **headers: str) -> Iterator[Viewer]:
    viewer = Viewer(url, f"/live{query}", headers)
    try:
        viewer.wait("pace")
        yield viewer
    finally:
        viewer.close()


def chat(url: str, text: str, **more: Any) -> httpx.Response:
    headers = more.pop("headers", {})
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 12, "temperature": 0, **more}
    return httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=patient_timeout(60))


def test_page_is_for_browsers(server: Server) -> None:
    """API clients get the JSON that `GET /` has without the view."""
    page = httpx.get(server.url, headers=HTML)
    assert page.headers["content-type"].startswith("text/html")
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "<script>" not in page.text
    assert " style=" not in page.text
    assert httpx.get(server.url).json()["name"] == "minisgl"
    for name in ("app.js", "live.css"):
        file = httpx.get(f"{server.url}/live/page/{name}")
        assert file.status_code == 200
        assert "http://" not in file.text.replace("http://www.w3.org/2000/svg", "")
    for name in ("none.js", "..%2fextension.py", "../extension.py"):
        assert httpx.get(f"{server.url}/live/page/{name}").status_code == 404


def test_other_sites_are_kept_out(server: Server) -> None:
    for path in ("/", "/live"):
        refused = httpx.get(server.url + path, headers={**HTML, "host": "evil.example.com"})
        assert refused.status_code == 403, path
    body = {"do": "pause"}
    assert (
        httpx.post(f"{server.url}/live/pace", json=body, headers={"origin": "http://evil.example.com"}).status_code
        == 403
    )


def test_events_are_a_trace(server: Server, tmp_path: Path) -> None:
    """The events of a page that was open from the start are a trace, without any token of a request."""
    with watching(server.url) as viewer:
        first = viewer.wait("now")
        if first["added"]:
            pytest.skip("another test has used the server before")
        answers = [chat(server.url, f"What is a page? {'Tell me more. ' * 9}") for _ in range(3)]
        assert [answer.status_code for answer in answers] == [200] * 3
        viewer.wait("finish", finish_reason=answers[-1].json()["choices"][0]["finish_reason"])
        lines = [line for line in viewer.lines if json.loads(line)["event"] not in ("server", "now", "pace", "own")]
    path = tmp_path / "live.jsonl"
    path.write_text("\n".join(lines) + "\n")
    trace = read(path)
    assert check(trace) is None
    kinds = {type(event).__name__ for event in trace}
    assert {"Add", "Match", "Admit", "Allocate", "Batch", "Cache", "Done", "Finish"} <= kinds
    for event in viewer.events:
        assert set(event.get("prompt_ids", [0])) == {0}
        assert set(event.get("tokens", [0])) <= {0}


def test_late_page_gets_the_state(server: Server) -> None:
    chat(server.url, "Hello")
    with watching(server.url) as viewer:
        state = viewer.wait("now")
        assert state["step"] > 0
        assert sum(count for value, count in state["owner"] if value == -3) == sum(
            len(node[1]) for node in state["tree"]
        )
        assert "ids" not in state
        assert "tokens" not in state


def test_a_page_learns_its_own_requests_only(server: Server) -> None:
    me, other = "a" * 32, "b" * 32
    with watching(server.url, f"?viewer={me}") as mine, watching(server.url, f"?viewer={other}") as others:
        answer = chat(server.url, "Hello", headers={"x-request-id": f"live.{me}.7"}).json()
        own = mine.wait("own")
        assert own["id"] == answer["id"]
        others.wait("finish", uid=own["uids"][0])
        assert not [event for event in others.events if event["event"] == "own"]
    assert httpx.get(f"{server.url}/live?viewer=<script>").status_code == 400


def test_pause_step_and_resume(server: Server) -> None:
    def pace(**body: Any) -> int:
        return httpx.post(f"{server.url}/live/pace", json=body).status_code

    until = time.monotonic() + patient_timeout(20)
    while pace(do="resume") != 409:  # until the server has noticed that no page is open
        assert time.monotonic() < until
        time.sleep(0.05)
    with watching(server.url) as viewer:
        assert pace(do="pause") == 200
        viewer.wait("pace", paused=True)
        thread = threading.Thread(target=chat, args=(server.url, "Count from 1 to 9."))
        thread.start()
        viewer.wait("add")
        added = len(viewer.events)
        assert httpx.get(f"{server.url}/metrics").status_code == 200  # the scheduler still answers
        assert not [event for event in viewer.events[added:] if event["event"] == "batch"]
        assert pace(do="step", steps=2) == 200
        while sum(event["event"] == "batch" for event in viewer.events[added:]) < 2:
            viewer.wait("batch")
            time.sleep(0.01)
        assert httpx.get(f"{server.url}/metrics").status_code == 200
        assert sum(event["event"] == "batch" for event in viewer.events[added:]) == 2
        assert thread.is_alive()
        assert pace(do="resume") == 200
        thread.join(patient_timeout(60))
        assert not thread.is_alive()
        for wrong in (
            {"do": "step", "steps": 0},
            {"do": "delay", "seconds": 99},
            {"do": "delay", "seconds": -1},
            {"do": "fly"},
        ):
            assert pace(**wrong) == 400
        assert pace(do="pause") == 200
    assert chat(server.url, "Hello").status_code == 200  # the last page has gone, so the server goes on


def test_key_and_text(locked: Server) -> None:
    assert httpx.get(locked.url, headers=HTML).status_code == 200
    assert httpx.get(f"{locked.url}/live").status_code == 401
    assert httpx.post(f"{locked.url}/live/pace", json={"do": "pause"}).status_code == 401
    headers = {"authorization": f"Bearer {KEY}"}
    with watching(locked.url, **headers) as viewer:
        assert viewer.wait("server") == {"event": "server", "model": "tutor", "control": False, "text": True}
        chat(locked.url, "Hello", headers=headers)
        assert len(set(viewer.wait("add")["prompt_ids"])) > 3
        refused = httpx.post(f"{locked.url}/live/pace", json={"do": "pause"}, headers=headers)
        assert refused.status_code == 403


def test_open_page_does_not_hold_up_the_end() -> None:
    """Neither the page nor a pause keeps a server from draining."""
    with Server("model=tutor", "num_pages=64", "live.delay=0.01") as server, watching(server.url) as viewer:
        assert viewer.wait("pace")["delay"] == 0.01
        assert httpx.post(f"{server.url}/live/pace", json={"do": "pause"}).status_code == 200
        answers: list[int] = []
        thread = threading.Thread(target=lambda: answers.append(chat(server.url, "Hello").status_code))
        thread.start()
        viewer.wait("add")
        server.process.terminate()
        assert server.process.wait(patient_timeout(60)) == 0
        thread.join(patient_timeout(10))
        assert answers == [200]


def test_slow_page_loses_frames_and_is_told() -> None:
    """The events for a page that reads nothing are bounded, and the server goes on; then it gets the state."""

    async def scenario() -> None:
        told: list[dict[str, Any]] = []
        link = SimpleNamespace(send=lambda topic, data: told.append(json.loads(data)))
        dispatcher = SimpleNamespace(state="ready", num_open=1, link=link)
        live = Live(control=True, text=False)
        live._api = SimpleNamespace(dispatcher=dispatcher)  # type: ignore[assignment]
        page = _Page(live, "", {"event": "server"})
        reads, sent, number = asyncio.Event(), list[bytes](), 0

        async def send(message: Any) -> None:
            if message["type"] == "http.response.body":
                await reads.wait()
                sent.append(message["body"])

        async def receive() -> Any:
            await asyncio.Event().wait()

        def observe(kind: bytes, data: bytes) -> None:
            nonlocal number
            number += 1
            live._receive(kind + b"%d\n" % number + data)

        def asked() -> int:
            return sum(each["do"] == "now" for each in told)

        task = asyncio.ensure_future(page({}, receive, send))
        while not asked():
            await asyncio.sleep(0)
        observe(b"n", b'{"event":"now"}')
        frames = 200
        for i in range(frames):
            observe(b"e", b'{"event":"pool","free":%d,"pad":"%s"}' % (i, b"x" * (32 << 10)))
            assert page._waiting <= MAX_WAITING
            await asyncio.sleep(0)
        assert frames * (32 << 10) > 4 * MAX_WAITING
        assert [each["number"] for each in told if each["do"] == "read"] == list(range(1, number + 1))
        reads.set()
        while asked() < 2:  # once it reads again, the state is asked for
            await asyncio.sleep(0)
        observe(b"n", b'{"event":"now"}')
        while b'"lost"' not in b"".join(sent):
            await asyncio.sleep(0)
        events = [json.loads(line[6:]) for line in b"".join(sent).splitlines() if line.startswith(b"data: ")]
        lost = next(event["frames"] for event in events if event["event"] == "lost")
        assert lost + sum(event["event"] == "pool" for event in events) >= frames
        assert [event["event"] for event in events[-2:]] == ["lost", "now"]
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    asyncio.run(scenario())


def test_requests_end_while_a_page_reads_nothing(server: Server) -> None:
    """A page whose connection is never read delays no request."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.socket() as silent:
        silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        silent.connect((host, int(port)))
        silent.sendall(f"GET /live HTTP/1.1\r\nhost: {host}:{port}\r\n\r\n".encode())
        with watching(server.url) as viewer:
            for i in range(4):
                assert chat(server.url, f"Count from {i} to 9.").status_code == 200
            viewer.wait("finish")


def test_options() -> None:
    here, there = Config(server=HttpConfig(host="127.0.0.1")), Config(server=HttpConfig(host="0.0.0.0"))
    assert Auto().is_on(here)
    assert not Auto().is_on(there)
    assert Auto().build(there) is None
    assert Off().build() is None
    assert On().is_on(there)
    assert On().may_control(here)
    assert not On().may_control(there)
    assert On(control=True).may_control(there)
    assert not Auto().may_control(Config(tp=2))
    with pytest.raises(ConfigError, match=r"live\.control=true"):
        On(delay=1.0).may_control(there)
    with pytest.raises(ConfigError, match="from 0 to 60"):
        Auto(delay=-1.0).may_control(here)


def test_the_bodies_are_described(server: Server) -> None:
    """``/openapi.json`` says what the routes of the live view need: a random body is refused with 400, by name."""
    paths = httpx.get(f"{server.url}/openapi.json").json()["paths"]
    for path, needed in {"/live/pace": "do", "/live/what-if": "at"}.items():
        schema = paths[path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert schema["required"] == [needed]
        answer = httpx.post(server.url + path, json={})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, needed)
        for name, bounds in ((name, each) for name, each in schema["properties"].items() if "maximum" in each):
            for value in (bounds["minimum"] - 1, bounds["maximum"] + 1):
                body = {"do": "pause"} if needed == "do" else {"at": 1}
                answer = httpx.post(server.url + path, json={**body, name: value})
                assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)
    schema = paths["/live/pace"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert "maximum" in schema["properties"]["steps"]
