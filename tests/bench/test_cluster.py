"""`bench cluster`: its requests, its command line and its files, in simulation and with servers that answer at once."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import zmq

from minisgl.bench.__main__ import main
from minisgl.bench.arguments import parse
from minisgl.bench.cluster import parser
from minisgl.bench.cluster import prepare as prepare_run
from minisgl.bench.clusters import requests as prepared
from minisgl.bench.clusters.results import ONE_CACHE, Served, compare, summarize
from minisgl.bench.clusters.servers import RememberedReplica, Subscription
from minisgl.bench.loadgen.traces import HASH_BLOCK
from minisgl.cluster.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, encode
from minisgl.cluster.routing import Replica

from .fake_openai import FakeServer

LINES = [
    {"timestamp": 1000, "input_length": 1100, "output_length": 9, "hash_ids": [4, 5, 6]},
    {"timestamp": 3000, "input_length": 1600, "output_length": 4, "hash_ids": [4, 5, 7, 8]},
    {"timestamp": 2000, "input_length": 1024, "output_length": 0, "hash_ids": [4, 9]},
    {"timestamp": 4000, "input_length": 5000, "output_length": 7, "hash_ids": [4]},
]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(gzip.compress("".join(json.dumps(line) + "\n" for line in LINES).encode()))
    return path


# ---- requests --------------------------------------------------------------------------------------------


def test_requests_of_a_trace(trace: Path) -> None:
    requests = prepared.prepare(prepared.read(trace, HASH_BLOCK), HASH_BLOCK)
    assert [(r.arrival, r.prompt_tokens, r.output_tokens) for r in requests] == [
        (0.0, 1100, 9),
        (1.0, 1024, 1),
        (2.0, 1600, 4),
        (3.0, 5000, 7),
    ]
    first, second, third, last = requests
    assert [len(r.hashes) for r in requests] == [2, 2, 3, 9]
    assert first.hashes == third.hashes[:2] and first.hashes[:1] == second.hashes[:1] == last.hashes[:1]
    assert len({h for r in requests for h in r.hashes}) == 2 + 1 + 1 + 8  # blocks without an id are equal to no others
    assert (first.prompt_ids()[:1024] == third.prompt_ids()[:1024]).all()
    assert first.prompt_ids()[1024] != third.prompt_ids()[1024]
    assert len(first.prompt_ids()) == 1100
    # Found: nothing; block 4; blocks 4 and 5; block 4. The second prompt has whole blocks only.
    assert prepared.unlimited_hit_rate(requests) == (512 + 1024 + 512) / (1100 + 1024 + 1600 + 5000)


def test_a_shorter_block_scales_all_lengths(trace: Path) -> None:
    entries = prepared.read(trace, 16)
    assert [(e.input_len, e.output_len) for e in entries] == [(34, 1), (32, 1), (50, 1), (156, 1)]
    assert [len(r.hashes) for r in prepared.prepare(entries, 16)] == [2, 2, 3, 9]


def test_made_up_requests() -> None:
    entries = prepared.made_up(200, 3, HASH_BLOCK)
    assert entries == prepared.made_up(200, 3, HASH_BLOCK) != prepared.made_up(200, 4, HASH_BLOCK)
    assert [e.timestamp for e in entries] == sorted(e.timestamp or 0.0 for e in entries)
    assert entries[0].timestamp == 0.0
    assert all(len(e.hash_ids) == -(-e.input_len // HASH_BLOCK) and e.hash_ids[0] == 0 for e in entries)
    assert 0.5 < prepared.unlimited_hit_rate(prepared.prepare(entries, HASH_BLOCK)) < 0.9


# ---- results ---------------------------------------------------------------------------------------------


def test_a_row_and_its_goal() -> None:
    served = [Served(0, 0.1, 100, 50, 10), Served(0, 0.2, 100, 0, 10), Served(1, 0.3, 200, 30, 20)]
    row = summarize("cache_aware", 2, served)
    assert (row.hit_rate, row.max_mean_tokens, row.requests_by_replica) == (0.2, 1.0, [2, 1])
    assert row.max_mean_requests == pytest.approx(4 / 3)
    assert row.ttft_p50_ms == pytest.approx(200)
    whole, baseline = summarize(ONE_CACHE, 2, served), summarize("round_robin", 2, served)
    compare([whole, baseline, row])
    assert (whole.reached, baseline.reached, row.hit_share) == (None, None, 1.0)
    assert row.reached is False  # 1.33 is above 1.3
    row.max_mean_requests = 1.3
    compare([whole, baseline, row])
    assert row.reached is True
    for name, value in (("hit_rate", 0.17), ("ttft_p99_ms", baseline.ttft_p99_ms + 1), ("max_mean_tokens", 1.31)):
        worse = summarize("cache_aware", 2, served)
        worse.max_mean_requests = 1.0
        setattr(worse, name, value)
        compare([whole, baseline, worse])
        assert worse.reached is False


# ---- the command line ------------------------------------------------------------------------------------


def test_files_of_a_simulation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, plot = tmp_path / "out.json", tmp_path / "out.svg"
    words = "--requests 40 --replicas 1 3 --pool 20000 routing.max_load=1.2 scheduler=mixed"
    main(["cluster", *words.split(), "--json", str(out), "--plot", str(plot)])
    report = json.loads(out.read_text())
    names = [ONE_CACHE, "round_robin", "least_loaded", "cache_aware"]
    assert [(row["replicas"], row["routing"]) for row in report["rows"]] == [
        (n, name) for n in (1, 3) for name in names
    ]
    assert report["step_cost_seconds"].keys() == {
        "step", "prompt_token", "prompt_context", "decode_row", "decode_context"
    }  # fmt: skip
    assert report["options"] == ["routing.max_load=1.2", "scheduler=mixed"]
    assert report["arguments"]["pool"] == report["pool_tokens"] == 20000
    single, several = report["rows"][:4], {row["routing"]: row for row in report["rows"][4:]}
    assert len({row["hit_rate"] for row in single}) == len({row["ttft_p99_ms"] for row in single}) == 1
    assert several["round_robin"]["hit_rate"] < several["cache_aware"]["hit_rate"] <= several[ONE_CACHE]["hit_rate"]
    assert all(sum(row["requests_by_replica"]) == 40 for row in report["rows"])
    printed = capsys.readouterr().out
    assert "KV pool: 20,000 tokens a replica" in printed and "prompt_token 3.93e-05" in printed
    svg = plot.read_text()
    assert svg.startswith("<svg") and "TTFT p99" in svg and ">cache_aware<" in svg


def test_a_trace_and_a_policy_of_ones_own(trace: Path, tmp_path: Path) -> None:
    """The example of the hook's page as ``--routing``; a request that no pool can hold is left out."""
    example = Path(__file__).resolve().parents[2] / "docs" / "examples" / "parts" / "routing.py"
    out = tmp_path / "out.json"
    words = ["--trace", str(trace), "--replicas", "2", "--pool", "4096", "--json", str(out), f"plugins={example}"]
    main(["cluster", *words, "--routing", "by_prompt"])
    report = json.loads(out.read_text())
    assert (report["requests"], report["left_out"]) == (3, 1)
    assert report["rows"][1]["requests_by_replica"] in ([3, 0], [0, 3])
    assert report["rows"][1]["reached"] is None  # there is no round_robin to compare it with


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--replicas 0", "--replicas: must be at least 1"),
        ("--rate 0", "--rate 0: must be a number above 0"),
        ("--pool 10", "no request has 0 tokens or fewer"),
        ("--requests 0", "--requests 0: must be at least 1"),
        ("--routing nearest", "routing=nearest: there is no such routing"),
        ("routing.max_load=0.5", "max_load must be a number of at least 1"),
        ("routing.reach=2", "none of the policies round_robin, least_loaded, cache_aware has this option"),
        ("--routing round_robin routing.window=2", "none of the policies round_robin has this option"),
        ("routing=round_robin", "bench cluster has no use for this option"),
        ("page_size=4", "bench cluster has no use for this option"),
        ("--servers http://127.0.0.1:1 cache=naive", "real servers have options of their own"),
        ("--servers http://127.0.0.1:1 --replicas 2", "there are as many as URLs"),
        ("--servers a b --kv-events tcp://127.0.0.1:1", "one address for each URL"),
        ("--kv-events tcp://127.0.0.1:1", "are for --servers"),
        ("--servers ftp://a", "is not the address of a server"),
        ("--trace nowhere.jsonl", "cannot be read"),
    ],
)
def test_wrong_arguments(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["cluster", *words.split()])
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_trace_without_prefixes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6,374,44\n")
    with pytest.raises(SystemExit, match="2"):
        main(["cluster", "--trace", str(path)])
    assert "has no times or no prefix hashes" in capsys.readouterr().err


# ---- servers ---------------------------------------------------------------------------------------------


def test_real_servers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two servers that answer at once. Without KV events, a conversation stays on the server that has its prefix."""
    out = tmp_path / "out.json"
    with FakeServer() as fake:
        urls = [f"{fake.url}/1-0", f"{fake.url}/2-0"]
        words = "--requests 24 --rate 100 --block 16 --vocab-size 500 --routing round_robin cache_aware"
        main(["cluster", *words.split(), "--servers", *urls, "--json", str(out)])
        sent = fake.take_log()
    report = json.loads(out.read_text())
    assert [row["routing"] for row in report["rows"]] == ["round_robin", "cache_aware"]
    assert report["rows"][0]["requests_by_replica"] == [12, 12]
    assert [row["requests"] for row in report["rows"]] == [24, 24]
    assert "the router's view: what was sent to them" in capsys.readouterr().out
    bodies = [entry["body"] for entry in sent]
    assert all(max(body["prompt"]) < 500 and body["ignore_eos"] and body["stream"] for body in bodies)
    first, second = bodies[:24], bodies[24:]
    assert {len(body["prompt"]) for body in first} == {len(body["prompt"]) for body in second}
    assert not {tuple(body["prompt"]) for body in first} & {tuple(body["prompt"]) for body in second}  # new prompts
    assert len({tuple(body["prompt"][:16]) for body in first if len(body["prompt"]) >= 16}) == 1


def test_failed_requests_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "--requests 12 --rate 100 --block 16 --vocab-size 500 --routing round_robin"
    with FakeServer() as fake, pytest.raises(SystemExit, match="1"):
        main(["cluster", *words.split(), "--servers", f"{fake.url}/1-0", f"{fake.url}/status503"])
    assert "6 requests failed, the first one: HTTP 503" in capsys.readouterr().out


def test_a_server_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["cluster", "--servers", "http://127.0.0.1:9", "--vocab-size", "9"])
    assert "no server answers at" in capsys.readouterr().err


def test_the_view_of_what_was_sent() -> None:
    """The blocks of the prompts that ended last; of one prompt, the end is forgotten first."""
    view = RememberedReplica(16, 3)
    view.start("a", [1, 2], 32, 4)
    view.end("a")
    view.start("b", [1, 3, 4], 48, 4)
    assert view.cached_blocks([1, 2]) == 2
    view.end("b")
    assert view.blocks == {1, 3, 4}
    view.start("c", [5], 16, 4)
    view.end("c")
    assert view.blocks == {1, 3, 5}
    view.start("d", [6], 16, 4)
    view.stop()
    assert (view.alive, view.requests, view.waiting_tokens, view.blocks) == (False, 0, 0, set())
    view.start("e", [7], 16, 4)
    view.end("e")
    assert view.blocks == {7}


def test_kv_events_are_the_view() -> None:
    """Messages in order are applied; after a gap, what is not known to be there is forgotten."""

    def stored(*hashes: int) -> BlockStored:
        return BlockStored(list(hashes), None, [0] * 16 * len(hashes), 16, None, "GPU", None)

    view, context = Replica(16), zmq.Context.instance()
    with context.socket(zmq.XPUB) as publisher:
        publisher.set(zmq.LINGER, 0)
        publisher.bind("tcp://127.0.0.1:*")
        subscription = Subscription(publisher.get_string(zmq.LAST_ENDPOINT).rstrip("\0"))
        try:
            assert publisher.recv() == b"\1"  # the subscription has arrived

            def send(number: int, *events: Any) -> None:
                before = subscription.messages
                publisher.send_multipart((b"", number.to_bytes(8, "big"), encode(events)))
                while subscription.messages == before:
                    subscription.read(view)

            send(0, AllBlocksCleared(), stored(1, 2, 3))
            assert (view.blocks, subscription.block_size) == ({1, 2, 3}, 16)
            send(1, BlockRemoved([2], "GPU"), stored(4))
            assert view.blocks == {1, 3, 4}
            send(5, stored(7))
            assert view.blocks == {7}
        finally:
            subscription.close()


def test_the_rate_is_that_of_all_replicas(trace: Path) -> None:
    """Four requests in three seconds arrive at 0.5 a second for each of two replicas: in four seconds."""
    setup = prepare_run(parse(parser(), ["--trace", str(trace), "--rate", "0.5"]))
    assert setup.speed(2 * setup.rate) == pytest.approx(3 / 4)
