"""``POST /live/what-if``: the recorded run of a server goes on in the simulated engine, as it was or otherwise."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from minisgl.testing.serving import Server, patient_timeout

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
    share = next(row for row in found["rows"] if row[0] == "prompt tokens from the cache")
    assert share[1] == share[2] != "0 %"
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
    assert next(row for row in smaller["rows"] if row[0] == "prompt tokens from the cache")[2] == "0 %"


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
    assert "KV pool" in ask(server, at=0, num_pages=2).json()["error"]


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
