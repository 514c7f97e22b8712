"""``POST /prove`` on a real server: four answers to one chat, and whether they have equal bits."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from minisgl.testing.serving import Server, scaled_timeout

CHAT = {
    "messages": [{"role": "user", "content": "What does the page table of a request hold? " * 8}],
    "max_completion_tokens": 40,
    "temperature": 0.8,
    "seed": 7,
    "logprobs": True,
    "top_logprobs": 2,
}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server("model=tutor", "exact=true", "page_size=16", "num_pages=256", "max_prefill_tokens=64") as running:
        yield running


def prove(server: Server, **changed: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/prove", json={**CHAT, **changed}, timeout=scaled_timeout(60))


def test_promise_8_equal_hashes_beside_other_requests(server: Server) -> None:
    alone = prove(server).json()
    assert alone.get("equal"), alone
    hits = {name: answer["cached_tokens"] for name, answer in alone["answers"].items()}
    assert hits["cold"] == 0
    assert hits["warm"] > hits["halves"] > 0
    done: list[int] = []

    def ask(number: int) -> None:
        body = {"prompt": f"request {number}", "max_tokens": 60, "ignore_eos": True}
        done.append(httpx.post(f"{server.url}/v1/completions", json=body, timeout=scaled_timeout(60)).status_code)

    others = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for other in others:
        other.start()
    beside = prove(server).json()
    for other in others:
        other.join()
    assert done == [200] * 4
    assert beside["equal"]
    assert {answer["sha256"] for answer in (*alone["answers"].values(), *beside["answers"].values())} == {
        alone["answers"]["cold"]["sha256"]
    }
    other_hash = prove(server, top_logprobs=3).json()["answers"]["cold"]["sha256"]
    assert other_hash != alone["answers"]["cold"]["sha256"]


@pytest.mark.parametrize(
    ("changed", "param"),
    [
        ({"seed": None}, "seed"),
        ({"n": 2}, "n"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"stream": True}, "stream"),
        ({"cache_salt": "mine"}, "cache_salt"),
        ({"max_completion_tokens": None}, "max_completion_tokens"),
    ],
)
def test_refused(server: Server, changed: dict[str, Any], param: str) -> None:
    answer = prove(server, **changed)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
