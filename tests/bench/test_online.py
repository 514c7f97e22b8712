"""`bench online` and `bench replay` with real client processes, against a server with fixed delays and a real one."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from minisgl.bench.__main__ import main
from minisgl.bench.loadgen.client_load import client_load
from minisgl.bench.loadgen.completion import RequestRecord, StreamReader, Template
from minisgl.bench.loadgen.drafts import DraftCounts, draft_fields, parse_counts
from minisgl.bench.loadgen.http import HttpClient, RequestError, ServerAddress
from minisgl.bench.loadgen.plan import Plan, WorkerResult
from minisgl.bench.loadgen.prompts import PromptFactory, RandomWorkload, Vocabulary
from minisgl.bench.loadgen.run import run
from minisgl.bench.loadgen.worker import Worker
from minisgl.testing.serving import Server

from . import raw_client
from .fake_openai import MAX_MODEL_LEN, FakeServer

pytestmark = pytest.mark.xdist_group("test_online")  # one process: the server starts once
VLLM_FIELDS = {
    "date", "endpoint_type", "backend", "label", "model_id", "tokenizer_id", "num_prompts", "request_rate",
    "burstiness", "max_concurrency", "duration", "completed", "failed", "total_input_tokens", "total_output_tokens",
    "request_throughput", "request_goodput", "output_throughput", "total_token_throughput", "max_output_tokens_per_s",
    "max_concurrent_requests",
    *(f"{statistic}_{metric}_ms" for metric in ("ttft", "tpot", "itl", "e2el")
      for statistic in ("mean", "median", "std", "p50", "p90", "p99")),
}  # fmt: skip
VLLM_DETAILS = {"input_lens", "output_lens", "ttfts", "itls", "start_times", "generated_texts", "errors"}


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    with FakeServer() as server:
        yield server


def bench(tmp_path: Path, *words: str, name: str = "online", fails: bool = False) -> Any:
    """Run the benchmark with two client processes and the fake server's vocabulary. Return its JSON report.

    ``fails``: no request is complete, so the exit status is 1.
    """
    file = tmp_path / "report.json"
    with pytest.raises(SystemExit, match="1") if fails else contextlib.nullcontext():
        main([name, "vocab_size=500", "warmup=0", "processes=2", *words, "--json", str(file)])
    return json.loads(file.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def bodies(server: FakeServer) -> list[dict[str, Any]]:
    """Return the bodies that the server received, in order of arrival."""
    return [entry["body"] for entry in server.take_log()]


# ---- the requests ------------------------------------------------------------------------------------


def test_open_loop(server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every request is sent once, with its lengths, and at its time."""
    server.take_log()
    url = f"url={server.url}/20-5"
    report = bench(tmp_path, url, "rate=40", "requests=20", "input=3:9", "output=2:6", "seed=5", "goodput=ttft:60000")
    log = server.take_log()
    workload = RandomWorkload(20, (3, 9), (2, 6), 5)
    expected = sorted((workload.request(i).input_len, workload.request(i).output_len) for i in range(20))
    assert sorted((len(entry["body"]["prompt"]), entry["body"]["max_tokens"]) for entry in log) == expected
    assert len({tuple(entry["body"]["prompt"]) for entry in log}) == 20
    body = log[0]["body"]
    assert max(max(entry["body"]["prompt"]) for entry in log) < 500
    assert (body["model"], body["temperature"], body["stream"], body["ignore_eos"]) == ("fake", 0.0, True, True)
    assert body["stream_options"] == {"include_usage": True} and "seed" not in body
    assert report.keys() >= VLLM_FIELDS and not VLLM_DETAILS & report.keys()
    assert (report["completed"], report["failed"], report["wrong"], report["num_prompts"]) == (20, 0, {}, 20)
    assert report["total_input_tokens"] == sum(length for length, _ in expected)
    assert report["total_output_tokens"] == sum(length for _, length in expected)
    assert report["cached_prompt_tokens"] == 20
    assert (report["request_rate"], report["max_concurrency"], report["backend"]) == (40, None, "openai")
    assert report["request_goodput"] == report["request_throughput"]
    assert report["median_ttft_ms"] >= 20 and report["median_e2el_ms"] >= 25
    # The last request is sent after exactly 20 / 40 s, and its answer takes 20 ms at least.
    assert report["duration"] >= 0.52
    assert report["client"]["processes"] == 2
    printed = capsys.readouterr().out
    assert "40 requests/s" in printed and "TTFT" in printed and "Client: 2 process(es)" in printed


def test_closed_loop(server: FakeServer, tmp_path: Path) -> None:
    """At most as many requests are in flight as there are clients, and each client sends more than one request."""
    server.take_log()
    report = bench(
        tmp_path, f"url={server.url}/5-5", "clients=5", "requests=23", "input=4", "output=4", "detailed=true"
    )
    log = server.take_log()
    assert len(log) == 23
    assert max(entry["in_flight"] for entry in log) == 5
    assert report["completed"] == 23 and report["max_concurrent_requests"] == 5
    assert (report["request_rate"], report["max_concurrency"]) == ("inf", 5)
    assert report.keys() >= VLLM_FIELDS | VLLM_DETAILS
    assert report["generated_texts"] == [" a a a a"] * 23
    assert report["input_lens"] == [4] * 23
    assert [len(itls) for itls in report["itls"]] == [3] * 23


def test_closed_loop_for_some_seconds(server: FakeServer, tmp_path: Path) -> None:
    server.take_log()
    report = bench(tmp_path, f"url={server.url}/5-0", "clients=3", "duration=0.6", "input=4", "output=2")
    assert report["completed"] == len(server.take_log()) >= 3
    assert report["num_prompts"] is None
    assert report["duration"] >= 0.3, "it ends at 0.6 s, or little earlier with the last response"


def test_chat_with_text_and_key(server: FakeServer, tmp_path: Path) -> None:
    """The event that opens a chat message is no token."""
    server.take_log()
    words = ["endpoint=chat", "tokenizer=tutor", "api_key=secret", "temperature=0.5", "seed=7", "model=mine"]
    report = bench(tmp_path, f"url={server.url}/60-5/v1/", *words, "requests=3", "input=6", "output=3", "detailed=true")
    log = server.take_log()
    assert {entry["path"] for entry in log} == {"/60-5/v1/chat/completions"}
    assert {entry["headers"]["authorization"] for entry in log} == {"Bearer secret"}
    assert sorted(entry["body"]["seed"] for entry in log) == [7, 8, 9]
    (message,) = log[0]["body"]["messages"]
    assert message["role"] == "user" and message["content"].startswith(" ")
    assert report["backend"] == "openai-chat" and report["tokenizer_id"] == "tutor" and report["model_id"] == "mine"
    assert min(report["ttfts"]) >= 0.05
    assert [len(itls) for itls in report["itls"]] == [2] * 3
    assert "secret" not in json.dumps(report)


def test_warmup_is_not_counted(server: FakeServer, tmp_path: Path) -> None:
    server.take_log()
    report = bench(tmp_path, f"url={server.url}", "warmup=5", "requests=4", "input=8", "output=2", "shared=16")
    prompts = [tuple(body["prompt"]) for body in bodies(server)]
    assert len(prompts) == len(set(prompts)) == 9
    assert report["completed"] == 4
    shared = [prompt[:16] for prompt in prompts]
    assert sorted(shared.count(prefix) for prefix in set(shared)) == [4, 5], "the warm-up has another prefix"
    assert {len(prompt) for prompt in prompts} == {24}


def test_drafts_of_the_server(server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A server's counts of drafts are reported for the measured requests, with vLLM's names; others have none."""
    words = ["requests=4", "input=8", "output=2"]
    report = bench(tmp_path, f"url={server.url}/drafting", "warmup=3", *words)
    found = {name: value for name, value in report.items() if name.startswith("spec_decode_")}
    assert found == {
        "spec_decode_acceptance_rate": 40.0,
        "spec_decode_acceptance_length": pytest.approx(2.2),
        "spec_decode_num_drafts": 40,
        "spec_decode_draft_tokens": 120,
        "spec_decode_accepted_tokens": 48,
        "spec_decode_per_position_acceptance_rates": pytest.approx([0.8, 0.4, 0.0]),
    }
    printed = capsys.readouterr().out
    assert "120, 48 (40.0 %)" in printed and "2.20" in printed
    sweep = bench(tmp_path, f"url={server.url}/drafting", "clients=1,2", *words)
    assert [each["spec_decode_num_drafts"] for each in sweep] == [40, 40]
    assert "40.0 % of 120 drafts accepted" in capsys.readouterr().out
    assert not any(name.startswith("spec_decode_") for name in bench(tmp_path, f"url={server.url}", *words))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "<h1>404</h1>",
        "vllm:num_requests_running 3\n",
        "vllm:spec_decode_num_drafts_total many\n",
        'vllm:spec_decode_num_drafts_total 1\nvllm:spec_decode_num_accepted_tokens_per_pos_total{position="x"} 1\n',
    ],
)
def test_metrics_without_drafts(text: str) -> None:
    assert parse_counts(text) is None


def test_no_fields_without_new_drafts() -> None:
    counts = DraftCounts(5.0, 9.0, 3.0)
    assert draft_fields(None, counts) == draft_fields(counts, None) == draft_fields(counts, counts) == {}
    assert draft_fields(counts, DraftCounts(1.0, 2.0, 1.0)) == {}, "the server was restarted"


def test_prompts_are_new_in_every_run_unless_asked(server: FakeServer, tmp_path: Path) -> None:
    words = [f"url={server.url}", "requests=3", "input=30", "output=1"]
    sent = []
    for extra in ([], [], ["new_prompts=false"], ["new_prompts=false"], ["new_prompts=false", "seed=1"]):
        server.take_log()
        bench(tmp_path, *words, *extra)
        sent.append({tuple(body["prompt"]) for body in bodies(server)})
    assert not sent[0] & sent[1]
    assert sent[2] == sent[3]
    assert not sent[3] & sent[4]


def test_sweep(server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each point has the same lengths and other prompts."""
    server.take_log()
    svg = tmp_path / "sweep.svg"
    words = [f"url={server.url}/5-1", "clients=1,4", "requests=8", "input=5:50", "output=2:9", "goodput=ttft:60000"]
    reports = bench(tmp_path, *words, "--plot", str(svg))
    prompts = [body["prompt"] for body in bodies(server)]
    assert [report["max_concurrency"] for report in reports] == [1, 4]
    assert [report["completed"] for report in reports] == [8, 8]
    assert sorted(map(len, prompts[:8])) == sorted(map(len, prompts[8:]))
    assert len(set(map(tuple, prompts))) == 16
    ElementTree.fromstring(svg.read_text())
    printed = capsys.readouterr().out
    assert "1 clients" in printed and "4 clients" in printed


# ---- traces ------------------------------------------------------------------------------------------


def test_replay_plays_the_times_of_a_trace(server: FakeServer, tmp_path: Path) -> None:
    """Three requests in 2 s of the trace: at speed 4, they arrive within half a second, in order."""
    trace = tmp_path / "trace.jsonl"
    lines = [(3000, 600, [5, 6]), (4000, 520, [5, 9]), (5000, 30, [])]
    trace.write_text("\n".join(
        json.dumps({"timestamp": at, "input_length": n, "output_length": 3, "hash_ids": ids}) for at, n, ids in lines
    ))  # fmt: skip
    server.take_log()
    report = bench(tmp_path, f"url={server.url}", f"trace={trace}", "speed=4", "detailed=true", name="replay")
    log = server.take_log()
    assert [len(entry["body"]["prompt"]) for entry in log] == [600, 520, 30]
    assert log[0]["body"]["prompt"][:512] == log[1]["body"]["prompt"][:512]
    assert log[0]["body"]["prompt"][512:520] != log[1]["body"]["prompt"][512:]
    late = report["client"]["max_send_delay_ms"] / 1e3  # on a busy machine; no request is sent early
    assert (np.diff(report["start_times"]) >= 0.25 - late - 1e-6).all()
    assert report["duration"] >= 0.5
    assert report["replay_speed"] == 4 and report["completed"] == 3


def test_trace_with_poisson_arrivals(server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.csv"
    rows = [f"2023-11-16 18:15:{i:02},{10 + i},2" for i in range(9)] + [f"2023-11-16 18:16:00,{MAX_MODEL_LEN},1"]
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(rows))
    server.take_log()
    report = bench(tmp_path, f"url={server.url}", f"trace={trace}", "rate=200")
    assert sorted(len(body["prompt"]) for body in bodies(server)) == list(range(10, 19))
    assert report["completed"] == 9
    assert "1 of 10 requests of the trace have more than 4,096 tokens and are left out" in capsys.readouterr().out


def test_share_gpt_as_text(server: FakeServer, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    turns = [{"from": "human", "value": "What is a radix cache?"}, {"from": "gpt", "value": "A tree of prefixes."}]
    trace.write_text(json.dumps([{"conversations": turns}]))
    server.take_log()
    bench(tmp_path, f"url={server.url}", f"trace={trace}", "prompts=text", "output=7")
    (body,) = bodies(server)
    assert (body["prompt"], body["max_tokens"]) == ("What is a radix cache?", 7)
    bench(tmp_path, f"url={server.url}", f"trace={trace}", "endpoint=chat", "tokenizer=tutor")
    (body,) = bodies(server)
    assert body["messages"][0]["content"] == "What is a radix cache?"
    assert body["max_tokens"] >= 4


def test_trace_without_times_cannot_be_replayed(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.json"
    trace.write_text('[{"conversations": [{"value": "a b c d e"}, {"value": "a b c d e"}]}]')
    for words, message in (
        (["prompts=text"], "has no times: use it with bench online"),
        ([], "the trace has texts: give tokenizer="),
    ):
        with pytest.raises(SystemExit, match="2"):
            main(["replay", f"url={server.url}", "vocab_size=9", f"trace={trace}", *words])
        assert message in capsys.readouterr().err


# ---- failing answers ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        ("status503", "HTTP 503: The queue is full."),
        ("html", "HTTP 502: <h1>Bad gateway</h1>"),
        ("truncated", "the server closed the connection before the response was complete"),
        ("error-event", "error in the stream: The engine died."),
        ("bad-event", "an event of the stream cannot be read"),
        ("json", "the response (application/json) has no event with output"),
        ("empty", "the response (text/event-stream) has no event with output"),
        ("no-end", "the stream ended without a finish_reason and without [DONE]"),
        ("garbage", "not a valid HTTP response"),
        ("stuck", "no complete response within timeout=0.5 s"),
    ],
)
def test_failing_answers_are_counted(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], behaviour: str, reason: str
) -> None:
    words = ["clients=2", "requests=4", "input=4", "output=6", *(["timeout=0.5"] if behaviour == "stuck" else [])]
    report = bench(tmp_path, f"url={server.url}/{behaviour}", *words, fails=True)
    assert (report["completed"], report["failed"], report["total_output_tokens"]) == (0, 4, 0)
    ((found, number),) = report["failures"].items()
    assert found.startswith(reason) and number == 4
    assert f"failed: 4 × {reason}" in capsys.readouterr().out


def test_half_of_the_answers_fail(server: FakeServer, tmp_path: Path) -> None:
    report = bench(tmp_path, f"url={server.url}/half", "clients=1", "requests=10", "input=4", "output=6")
    assert (report["completed"], report["failures"]) == (5, {"HTTP 500: odd": 5})
    assert report["total_output_tokens"] == 5 * 6


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [("short", "another number of tokens than max_tokens"), ("no-usage", "no usage in the stream")],
)
def test_wrong_answers_are_counted(server: FakeServer, tmp_path: Path, behaviour: str, reason: str) -> None:
    report = bench(tmp_path, f"url={server.url}/{behaviour}", "requests=3", "input=4", "output=6")
    assert report["completed"] == 3
    assert report["total_output_tokens"] == {"short": 15, "no-usage": 18}[behaviour]
    ((found, number),) = report["wrong"].items()
    assert found.startswith(reason) and number == 3
    if behaviour == "short":
        words = ["requests=3", "input=4", "output=6", "ignore_eos=false"]
        assert bench(tmp_path, f"url={server.url}/short", *words)["wrong"] == {}


@pytest.mark.parametrize("behaviour", ["bytewise", "until-close", "idle-close"])
def test_unusual_but_right_answers(server: FakeServer, tmp_path: Path, behaviour: str) -> None:
    words = ["clients=2", "requests=6", "input=4", "output=3", "detailed=true"]
    report = bench(tmp_path, f"url={server.url}/{behaviour}", *words)
    assert (report["completed"], report["failures"], report["wrong"]) == (6, {}, {})
    assert report["generated_texts"] == [" a a a"] * 6


def test_no_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["online", "url=http://127.0.0.1:9", "vocab_size=9"])
    assert "no server answers at http://127.0.0.1:9/v1/models" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["online", "url=http://127.0.0.1:9", "vocab_size=9", "model=x"])
    assert "every warm-up request failed: no connection" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["url=http://"], "is not the address of a server"),
        (["url=http://x:port"], "is not the address of a server"),
        (["url=http://x/ü"], "printable ASCII"),
        (["api_key=a\nb"], "printable ASCII"),
    ],
)
def test_wrong_addresses_are_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["online", *words])
    assert message in capsys.readouterr().err


def test_unknown_vocabulary(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["online", f"url={server.url}"])
    assert "give tokenizer=DIRECTORY" in capsys.readouterr().err


# ---- Ctrl-C ------------------------------------------------------------------------------------------


def test_ctrl_c_reports_what_was_measured(server: FakeServer, tmp_path: Path) -> None:
    """Only complete requests count; the two in flight are interrupted, not failed."""
    file = tmp_path / "report.json"
    server.take_log()
    words = ["vocab_size=9", "input=3", "output=2", "requests=100000", "clients=2", "warmup=0", "--json", str(file)]
    command = [sys.executable, "-m", "minisgl.bench", "online", f"url={server.url}/20-1", *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    seen = 0
    while seen < 10 and process.poll() is None:
        seen += len(server.take_log())
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to every process of the group
    out, _ = process.communicate(timeout=600)
    assert process.returncode == 130
    report = json.loads(file.read_text())
    assert report["interrupted_run"] and report["failed"] == 0
    assert 0 < report["completed"] < 100_000 and 0 < report["interrupted"] <= 2
    assert report["total_output_tokens"] == 2 * report["completed"]
    assert "Stopped by Ctrl-C" in out


def test_ctrl_c_before_the_measurement(server: FakeServer) -> None:
    server.take_log()
    command = [sys.executable, "-m", "minisgl.bench", "online", f"url={server.url}/stuck", "vocab_size=9", "input=3"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    while not server.take_log() and process.poll() is None:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=600)
    assert (process.returncode, errors.strip()) == (130, "minisgl.bench: stopped before the first measurement.")


def test_killed_benchmark_leaves_no_process(server: FakeServer) -> None:
    server.take_log()
    words = ["vocab_size=9", "input=3", "output=2", "requests=100000", "clients=2", "warmup=0", "processes=2"]
    process = subprocess.Popen([sys.executable, "-m", "minisgl.bench", "online", f"url={server.url}/20-1", *words])
    while not server.take_log() and process.poll() is None:
        time.sleep(0.05)
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) >= 2
    process.kill()
    process.wait()
    gone, alive = psutil.wait_procs(children, timeout=120)
    assert len(gone) == len(children) and not alive


# ---- is the client the limit? ------------------------------------------------------------------------


def test_lack_of_descriptors_is_the_clients_limit(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    async def full(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    async def post() -> str:
        monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", full)
        record = RequestRecord(0, 1, 1)
        try:
            await HttpClient(ServerAddress.parse(server.url)).post("/v1/completions", b"", StreamReader(record, True))
        except RequestError as error:
            return str(error)
        return ""

    reason = asyncio.run(post())
    assert reason == "the client is at its limit: no connection: Too many open files"
    (limit,) = client_load([WorkerResult([RequestRecord(0, 1, 1, error=reason)])], 1.0, 1.0).limits
    assert "1 requests failed because the client has no file descriptor" in limit


def plan_of(url: str, count: int, due: np.ndarray[Any, np.dtype[np.float64]]) -> Plan:
    """Return the plan of a single client process, with outputs of 20 tokens."""
    return Plan(
        ServerAddress.parse(url), Template(False, "fake", 0.0, True, 0),
        RandomWorkload(count, (4, 4), (20, 20), 0), PromptFactory(Vocabulary(np.arange(9)), 0),
        first=0, step=1, total=count, due=due, clients=count, duration=None, warmup=0, timeout=60,
    )  # fmt: skip


def test_progress_covers_every_request(server: FakeServer) -> None:
    seen: list[tuple[int, int, int]] = []
    measured = run([plan_of(f"{server.url}/half", 30, np.linspace(0, 0.7, 30))], lambda *counts: seen.append(counts))
    assert len(seen) >= 2
    assert np.sum(seen, axis=0).tolist() == [30, 15, 15 * 20]
    assert len(measured.records) == 30 and not measured.interrupted


def test_slow_client_is_noticed(server: FakeServer) -> None:
    """An event loop that is blocked for 40 ms at a time sees tokens late. A busy machine makes it only later."""
    plan = plan_of(f"{server.url}/10-5", 20, np.linspace(0, 0.5, 20))
    ours, theirs = multiprocessing.Pipe()
    ours.send(time.perf_counter())

    async def slow() -> Worker:
        async def block() -> None:
            while True:
                time.sleep(0.04)
                await asyncio.sleep(0.001)

        worker = Worker(plan, theirs)
        blocking = asyncio.create_task(block())
        await worker.main()
        blocking.cancel()
        return worker

    worker = asyncio.run(slow())
    assert len(worker.result.records) == 20 and not any(record.error for record in worker.result.records)
    load = client_load([worker.result], ttft=0.010, itl=0.005)
    assert load.p99_loop_lag_ms > 10
    assert any("woke up" in reason for reason in load.limits)
    assert any("were sent" in reason for reason in load.limits)


# ---- agreement ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("load", ["closed loop", "given times"])
def test_agreement_with_a_raw_client(server: FakeServer, tmp_path: Path, load: str) -> None:
    """Medians and throughput of two clients that share no code differ by less than 3 %.

    The delays of the server are the same for both, but not the machine's other work. So one of six attempts has to
    agree. From the second one on, the raw client runs twice, and its own difference is added to the limit.
    """
    url, count = f"{server.url}/400-60", 8
    asked = raw_client.bodies(count, "fake", 16, 10, 500, seed=1)
    words = ["clients=4"] if load == "closed loop" else ["rate=8", "burstiness=inf"]
    names = ["output_throughput", *(f"median_{metric}_ms" for metric in ("ttft", "tpot", "itl", "e2el"))]

    def run_raw_client() -> tuple[list[raw_client.Exchange], dict[str, float]]:
        with contextlib.closing(raw_client.RawClient(url)) as client:
            begin = time.perf_counter()
            if load == "closed loop":
                exchanges = client.closed_loop(asked, 4)
            else:
                exchanges = client.at_times(asked, [0.125 * (i + 1) for i in range(count)])
            return exchanges, raw_client.summary(exchanges, begin)

    wrong: list[dict[str, tuple[float, float]]] = []
    for attempt in range(6):
        exchanges, raw = run_raw_client()
        ours = bench(tmp_path, f"url={url}", *words, f"requests={count}", "input=16", "output=10", "processes=1")
        again = run_raw_client()[1] if attempt else raw
        found = {name: (abs(ours[name] / raw[name] - 1), abs(again[name] / raw[name] - 1)) for name in names}
        wrong.append({name: both for name, both in found.items() if both[0] >= 0.03 + both[1]})
        if not wrong[-1]:
            break
    else:
        pytest.fail(f"no agreement within 3 %: {wrong}")
    assert ours["total_output_tokens"] == sum(exchange.output_len for exchange in exchanges) == 10 * count


def test_raw_client_counts_tokens_as_they_arrive(server: FakeServer) -> None:
    client = raw_client.RawClient(f"{server.url}/100-20")
    (exchange,) = client.closed_loop(raw_client.bodies(1, "fake", 4, 5, 9, seed=0), 1)
    client.close()
    assert len(exchange.tokens) == exchange.output_len == 5
    assert exchange.tokens[0] - exchange.start >= 0.1
    assert exchange.tokens[-1] - exchange.start >= 0.18


# ---- a real server -----------------------------------------------------------------------------------


def test_real_server(tmp_path: Path) -> None:
    """Lengths in the report are those that the server counted, for prompts as ids and for a chat."""
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(
        json.dumps({"timestamp": 100 * i, "input_length": 530 + i, "output_length": 4, "hash_ids": [0, 1 + i]})
        for i in range(3)
    ))  # fmt: skip
    with Server("model=tutor", "num_pages=512", "speculation=ngram", "speculation.match_tokens=1") as real:
        common = [f"url={real.url}", "vocab_size=null", "processes=1", "warmup=1", "detailed=true"]
        # Slowly, so that each prompt finds the one before it in the cache also on a busy machine.
        report = bench(tmp_path, *common, f"trace={trace}", "speed=0.05", name="replay")
        assert (report["completed"], report["failures"], report["wrong"]) == (3, {}, {})
        assert (report["model_id"], report["tokenizer_id"]) == ("tutor", "tutor")
        assert report["input_lens"] == [530, 531, 532] and report["output_lens"] == [4] * 3
        assert report["cached_prompt_tokens"] == 2 * 512, "equal hash ids are found in the server's prefix cache"
        report = bench(tmp_path, *common, "endpoint=chat", "clients=2", "requests=4", "input=20:40", "output=8")
        assert (report["completed"], report["failures"], report["wrong"]) == (4, {}, {})
        asked = [RandomWorkload(4, (20, 40), (8, 8), 0).request(i).input_len for i in range(4)]
        template = np.array(report["input_lens"]) - asked
        assert template.min() == template.max() > 0, "the chat template adds the same tokens to each prompt"
        # On a busy machine, an answer may arrive in one piece.
        assert 0 < report["p50_ttft_ms"] <= report["p50_e2el_ms"]
        report = bench(tmp_path, *common, "clients=2", "requests=4", "input=200", "output=100")
        assert 0 <= report["spec_decode_accepted_tokens"] <= report["spec_decode_draft_tokens"] > 0
        assert len(report["spec_decode_per_position_acceptance_rates"]) == 16
