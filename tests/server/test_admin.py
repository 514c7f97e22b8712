"""``/flush_cache`` and ``/abort_request``, and a running stream beside a grammar that compiles for long."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest

from minisgl.config import Config
from minisgl.plugin_manager.manager import PluginManager
from minisgl.plugins.http.apis import queries
from minisgl.testing.serving import Server, patient_timeout
from minisgl.testing.small import SPEC, job, make
from minisgl.trace.check import check
from minisgl.trace.read import read

ADMIN = {"authorization": "Bearer secret"}
USER: list[Any] = [{"role": "user", "content": "What is a KV cache? Explain it in a long sentence."}]
LONG = {"messages": USER, "stream": True, "ignore_eos": True, "max_tokens": 900, "temperature": 0}
SLOW = """
import os
import time
from dataclasses import dataclass
from minisgl.hooks import hookimpl
from minisgl.plugins.grammar.plain import PlainGrammars

class SlowGrammars(PlainGrammars):
    def _matcher(self, grammar, vocab_size, end_ids):
        open(os.environ["GATE"]).read()  # until the test opens the pipe
        return super()._matcher(grammar, vocab_size, end_ids)

@dataclass
class Slow:
    def build(self, tokenizer):
        return SlowGrammars(tokenizer)

@hookimpl
def minisgl_configs():
    yield "grammar", "slow", Slow

class SlowSteps:
    @hookimpl
    def minisgl_batch_scheduled(self, step, reqs):
        if any(req.params.cache_salt == "slow" for req in reqs):
            time.sleep(0.2)

@hookimpl
def minisgl_observer():
    return SlowSteps()
"""
ENDLESS = LONG | {"cache_salt": "slow"}
"""A request that is aborted long before its end: 900 steps take at least 180 s."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("slow")
    plugin, gate = folder / "slow_grammar.py", folder / "gate"
    plugin.write_text(SLOW)
    os.mkfifo(gate)
    options = ("model=tutor", "num_pages=512", "server.admin_key=secret", f"plugins={plugin}", "grammar=slow")
    with Server(*options, env={"GATE": str(gate)}) as running:
        running.folder.joinpath("gate").symlink_to(gate)
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=patient_timeout(60)) as made:
        yield made


def events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """Yield the events of a stream."""
    for line in lines:
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


def test_a_slow_compilation_beside_a_running_stream(server: Server, client: httpx.Client) -> None:
    """The stream goes on to its end while a grammar is compiled, and then that request is answered."""
    answers: list[Any] = []

    def ask() -> None:
        body = {"messages": USER, "max_tokens": 20, "structured_outputs": {"choice": ["yes", "no"]}}
        answers.append(httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=patient_timeout(60)).json())

    asking = threading.Thread(target=ask)
    with client.stream("POST", "/v1/chat/completions", json=LONG) as response:
        stream = events(response.iter_lines())
        next(stream), next(stream)
        asking.start()
        while server.metrics()["minisgl_scheduler_num_waiting_reqs"] < 1:  # until the scheduler has the request
            assert next(stream)["choices"][0]["finish_reason"] is None
        assert [event["choices"][0]["finish_reason"] for event in stream][-1] == "length"
    assert not answers
    (server.folder / "gate").open("w").close()
    asking.join()
    assert answers[0]["choices"][0]["message"]["content"] in ("yes", "no")


def test_flush_cache(client: httpx.Client) -> None:
    body = {"prompt": "the same long prompt " * 20, "max_tokens": 1, "temperature": 0}

    def cached() -> int:
        answer = client.post("/v1/completions", json=body).json()
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    cached()
    assert cached() > 0
    for method in ("POST", "GET"):
        answer = client.request(method, "/flush_cache", headers=ADMIN)
        assert answer.status_code == 200
    assert cached() == 0
    with client.stream("POST", "/v1/chat/completions", json=ENDLESS) as response:
        stream = events(response.iter_lines())
        next(stream)
        refused = client.post("/flush_cache", headers=ADMIN)
        assert refused.status_code == 400
        assert "running or waiting" in refused.json()["error"]["message"]
    assert client.get("/health").status_code == 200


@pytest.mark.parametrize("how", ["response id", "request id", "all"])
def test_abort_request(client: httpx.Client, how: str) -> None:
    """The client gets an error that says why, and its request ends in the scheduler, too."""
    headers = {"x-request-id": f"mine-{how.replace(' ', '-')}"}
    with client.stream("POST", "/v1/chat/completions", json=ENDLESS, headers=headers) as response:
        stream = events(response.iter_lines())
        first = next(stream)
        named = {"response id": {"rid": first["id"]}, "request id": {"rid": headers["x-request-id"]}}
        body = named.get(how, {"abort_all": True, "abort_message": "Maintenance."})
        answer = client.post("/abort_request", json=body, headers=ADMIN)
        assert answer.json() == {"success": True, "num_aborted": 1}
        *_, last = stream
    assert last["error"]["code"] == "request_aborted"
    assert ("Maintenance." if how == "all" else "administrator") in last["error"]["message"]
    assert client.post("/abort_request", json=body, headers=ADMIN).json()["num_aborted"] == 0
    while client.post("/flush_cache", headers=ADMIN).status_code != 200:  # until the scheduler knows of the abort
        pass


def test_abort_without_a_stream(server: Server, client: httpx.Client) -> None:
    """The status is one after which the package ``openai`` does not ask again."""
    failed: list[openai.APIStatusError] = []

    def ask() -> None:
        own = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=2)
        with pytest.raises(openai.APIStatusError) as raised:
            own.chat.completions.create(
                model="tutor", messages=USER, max_tokens=900, extra_body={"ignore_eos": True, "cache_salt": "slow"},
                extra_headers={"x-request-id": "waits"},
            )  # fmt: skip
        failed.append(raised.value)

    asking = threading.Thread(target=ask)
    asking.start()
    while not client.post("/abort_request", json={"rid": "waits"}, headers=ADMIN).json()["num_aborted"]:
        pass
    asking.join()
    assert (failed[0].status_code, failed[0].code) == (499, "request_aborted")


def test_only_with_the_admin_key(client: httpx.Client) -> None:
    for headers in ({}, {"authorization": "Bearer none"}):
        assert client.post("/flush_cache", headers=headers).status_code == 401
        assert client.post("/abort_request", json={"abort_all": True}, headers=headers).status_code == 401
    empty = client.post("/abort_request", json={}, headers=ADMIN)
    assert (empty.status_code, empty.json()["error"]["param"]) == (400, "rid")


@pytest.mark.xdist_group("tutor")
def test_without_an_admin_key(tutor: Server) -> None:
    for path in ("/flush_cache", "/abort_request"):
        answer = httpx.post(tutor.url + path, json={"abort_all": True}, headers=ADMIN)
        assert answer.status_code == 403
        assert "server.admin_key" in answer.json()["error"]["message"]


def test_flushed_cache_is_empty(tmp_path: Path) -> None:
    """An open request keeps the cache. Then all of it is evicted, and the same prompt is computed anew."""
    trace = tmp_path / "run.jsonl"
    manager = PluginManager.load(light=True)
    manager.observe(Config(trace=str(trace)), SPEC)
    drive = make(observers=manager.hook)
    loop: Any = SimpleNamespace(scheduler=drive.scheduler)
    drive.add(job(1, length=17, first=5))
    for _ in range(3):
        drive.step()
        assert queries.flush_cache(loop) is None
    drive.abort(1)
    assert queries.flush_cache(loop) == queries.BUSY  # a step with a row of the request that has ended
    drive.step()
    assert queries.flush_cache(loop) == 4
    assert drive.scheduler.cache_manager.page_counts() == (SPEC.num_pages, 0, 0, 0)
    assert queries.flush_cache(loop) == 0
    drive.run([job(2, length=17, first=5), job(3, length=17, first=5, arrive=99)])
    assert [drive.report.finished[uid].cached_tokens for uid in (1, 2, 3)] == [0, 0, 16]
    manager.close()
    assert check(read(trace)) is None
