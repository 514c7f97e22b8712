"""The router smg (``minisgl[cluster]``). `make check-cluster` installs it and runs these tests; `.ci/run` does not."""

from __future__ import annotations

import importlib.util
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import httpx
import openai
import psutil
import pytest

from minisgl.cluster.cli import main
from minisgl.testing.serving import patient_timeout

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("smg") is None, reason="smg is not installed: make check-cluster"
)
START = Callable[..., Any]


def until(condition: Callable[[], Any], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + patient_timeout(seconds)
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_auto_is_smg_where_it_is_installed(start_cluster: START, leftovers: Callable[[], list[str]]) -> None:
    """A killed replica is removed from smg and comes back; a killed supervisor leaves nothing."""
    cluster = start_cluster("replicas=2", fake=True)
    cluster.wait_until_ready()
    cluster.read_status_url()
    assert cluster.status_url != cluster.url
    for index in range(6):
        body = {"model": "tutor", "prompt": f"{index} prompt"}
        assert httpx.post(f"{cluster.url}/v1/completions", json=body).status_code == 200
    until(lambda: sum(each["requests"] for each in cluster.replicas()) == 6)
    assert 'minisgl_cluster_up{replica="1"} 1' in httpx.get(f"{cluster.status_url}/metrics").text
    before = cluster.replicas()
    os.kill(before[1]["pid"], signal.SIGKILL)
    until(lambda: cluster.replicas()[1]["restarts"] == 1)
    after = cluster.wait_for_states("ready", "ready")
    workers = httpx.get(f"{cluster.url}/workers").json()["workers"]
    assert {worker["url"] for worker in workers if worker["status"] == "ready"} == {each["url"] for each in after}
    assert after[1]["url"] != before[1]["url"]
    children = psutil.Process(cluster.process.pid).children()  # smg, two servers
    assert len(children) == 3
    cluster.process.kill()
    until(lambda: not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children))
    until(lambda: leftovers() == [])


def test_the_end_of_smg_ends_the_cluster(start_cluster: START, leftovers: Callable[[], list[str]]) -> None:
    cluster = start_cluster("router=smg", fake=True)
    cluster.wait_until_ready()
    children = psutil.Process(cluster.process.pid).children()
    [smg] = [child for child in children if "fake_server" not in " ".join(child.cmdline())]
    smg.kill()
    assert cluster.process.wait(patient_timeout(60)) == 1
    assert "The router ended: smg was killed by SIGKILL" in cluster.log()
    until(lambda: leftovers() == [])


def test_a_clean_end_logs_no_error(start_cluster: START, leftovers: Callable[[], list[str]]) -> None:
    """At SIGTERM smg ends before the servers do. It is not asked to remove them then."""
    cluster = start_cluster("router=smg", fake=True)
    cluster.wait_until_ready()
    cluster.process.send_signal(signal.SIGTERM)
    assert cluster.process.wait(patient_timeout(60)) == 0
    assert "ERROR" not in cluster.log()
    assert "Traceback" not in cluster.log()
    until(lambda: leftovers() == [])


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("routing.max_load=2", "smg has policies of its own"),
        ("server.root_path=/llm", "not available with router=smg"),
    ],
)
def test_options_that_smg_does_not_have(word: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["router=smg", "device=cpu", word])
    assert caught.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert message in line


def test_two_servers_behind_smg(start_cluster: START, leftovers: Callable[[], list[str]]) -> None:
    """The ``openai`` client as it is, also while a server is killed. SIGTERM drains."""
    cluster = start_cluster("router=smg", "num_pages=1024", "server.api_key=key", "log_level=warning")
    cluster.wait_until_ready()
    cluster.read_status_url()
    messages: Any = [{"role": "user", "content": "What is a KV cache?"}]
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="key", max_retries=0, timeout=60) as client:
        ask = client.chat.completions.create
        whole = ask(model="tutor", messages=messages, max_tokens=16, temperature=0)
        chunks = ask(model="tutor", messages=messages, max_tokens=16, temperature=0, stream=True)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert text == whole.choices[0].message.content
        completion = client.completions.create(model="tutor", prompt="A page is", max_tokens=4)
        assert completion.choices[0].text
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="wrong").chat.completions.create(model="tutor", messages=messages)
        victim = max(cluster.replicas(), key=lambda each: each["requests"])
        os.kill(victim["pid"], signal.SIGKILL)
        answer = ask(model="tutor", messages=messages, max_tokens=16, temperature=0)  # smg sends it to the other one
        assert answer.choices[0].message.content == text
        until(lambda: cluster.replicas()[victim["replica"]]["restarts"] == 1)
        cluster.wait_for_states("ready", "ready")
        stream = ask(model="tutor", messages=messages, max_tokens=500, stream=True, extra_body={"ignore_eos": True})
        first = next(iter(stream))
        assert first.choices
        cluster.process.send_signal(signal.SIGTERM)
        assert [chunk.choices[0].finish_reason for chunk in stream][-1] == "length"
    assert cluster.process.wait(patient_timeout(60)) == 0
    until(lambda: leftovers() == [])
