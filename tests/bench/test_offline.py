"""The offline benchmark: its counts are correct, and transformers generates the same tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from minisgl.bench.__main__ import main
from minisgl.bench.measure import Meter, run
from minisgl.bench.workload import SampleRequest, parse_range, random_requests, read_requests
from minisgl.config import ConfigError
from minisgl.core import EngineSpec, SamplingParams
from minisgl.plugins.cache.radix import RadixCache
from minisgl.plugins.scheduler.prefill_first import PrefillFirstPolicy
from minisgl.scheduler.scheduler import Scheduler
from minisgl.testing import SimEngine, SimRequest
from minisgl.testing.checkpoints import tiny_checkpoint


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("qwen3", tmp_path_factory.mktemp("bench"), tokenizer=True)


def test_report_with_transformers(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "report.json"
    words = f"offline model={path} device=cpu num_pages=256 --requests 9 --input 5:40 --output 3:12 --shared 32"
    main([*words.split(), "--compare", "transformers", "--json", str(out)])
    report = json.loads(out.read_text())
    ours, theirs = report["minisgl"], report["transformers"]
    requests = random_requests(9, (5, 40), (3, 12), 320, 0, shared=32)
    assert ours["requests"] == 9
    assert ours["prompt_tokens"] == sum(len(request.prompt_ids) for request in requests)
    assert ours["output_tokens"] == theirs["output_tokens"] == sum(request.output_len for request in requests)
    assert theirs["same_outputs"] == 9
    # Each token but the last of a request is computed once or comes from the cache.
    assert ours["computed_tokens"] == ours["prompt_tokens"] + ours["output_tokens"] - 9 - ours["cached_tokens"]
    assert ours["cached_tokens"] >= 8 * 32
    assert ours["output_tokens_per_second"] == pytest.approx(ours["output_tokens"] / ours["seconds"])
    assert report["machine"]["dtype"] == "float32"
    printed = capsys.readouterr().out
    assert "times transformers' throughput; 9 of 9 outputs equal" in printed
    assert "worst gap" in printed


def test_counts_on_the_simulated_engine() -> None:
    """Two requests whose steps can be counted by hand, with chunks of 8 tokens and prefill first."""
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    requests = [SampleRequest(list(range(10)), 4), SampleRequest(list(range(50, 74)), 4)]
    simulated = {i: SimRequest(request.prompt_ids, params) for i, request in enumerate(requests)}
    engine = SimEngine(EngineSpec(4, 64, 8, 128, 1000), simulated, depth=1)
    meter = Meter(engine)
    scheduler = Scheduler(meter, RadixCache(4), PrefillFirstPolicy("fcfs"), max_prefill_tokens=8, overlap=False)
    result, tokens = run(scheduler, meter, requests, lambda i: params)
    assert [len(t) for t in tokens.values()] == [4, 4]
    assert result.computed_tokens == 10 + 24 + 2 * 3
    assert result.steps == engine.counts.steps
    assert result.cached_tokens == result.retractions == 0
    # The step with the first token of request 0 computes 2 tokens of its prompt and 6 of the other prompt. Before its
    # second token, the engine computes the other 18 prompt tokens and a decode step of two rows.
    assert result.worst_gap_tokens == 18 + 2
    assert 0 < result.ttft_p50 <= result.ttft_p99 <= result.seconds
    again, _ = run(scheduler, meter, requests[:0], lambda i: params)
    assert (again.requests, again.steps, again.output_tokens) == (0, 0, 0)


def test_requests_from_a_file(path: Path, tmp_path: Path) -> None:
    file = tmp_path / "requests.jsonl"
    file.write_text('{"prompt": [5, 6], "max_tokens": 3}\n\n{"prompt": [7]}\n')
    assert read_requests(file, None, 9) == [SampleRequest([5, 6], 3), SampleRequest([7], 9)]
    out = tmp_path / "report.json"
    main(["offline", f"model={path}", "device=cpu", "num_pages=64", "--file", str(file), "--output", "4",
          "--temperature", "0.7", "--json", str(out)])  # fmt: skip
    assert json.loads(out.read_text())["minisgl"]["output_tokens"] == 3 + 4


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"max_tokens": 3}', "requests.jsonl:1 is not a request"),
        ("{", "requests.jsonl:1 is not a request"),
        ("", "contains no request"),
        ('{"prompt": "hi"}', "no tokenizer"),
    ],
)
def test_wrong_file_is_refused(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "requests.jsonl"
    file.write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_requests(file, None, 9)


@pytest.mark.parametrize("text", ["", "x", "5:2", "0:3", "1:2:3"])
def test_wrong_range(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a range of tokens"):
        parse_range(text)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nothing"], "there is no benchmark 'nothing'"),
        (["offline", "--compare", "transformers", "--temperature", "1"], "--compare is greedy"),
        (["offline", "model=/nowhere"], "model=/nowhere: there is no such directory"),
        (
            ["offline", "--requests", "0", "model={path}", "device=cpu", "num_pages=9"],
            "--requests 0: must be",
        ),
    ],
)
def test_wrong_arguments_exit_with_status_2(
    words: list[str], message: str, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main([word.format(path=path) for word in words])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_acceptance_by_a_coin(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The share of accepted drafts is the given one; with four drafts always verified, the tokens a step follow."""
    words = "device=cpu num_pages=256 --requests 8 --input 20 --output 90 --temperature 0.7"
    results = {}
    for acceptance, fixed in ((0.0, []), (1.0, ["--fixed-drafts"]), (0.7, ["--fixed-drafts"])):
        out = tmp_path / "report.json"
        main(["offline", f"model={path}", *words.split(), f"--acceptance={acceptance}", *fixed, "--json", str(out)])
        results[acceptance] = json.loads(out.read_text())["minisgl"]
        assert results[acceptance]["output_tokens"] == 8 * 90
    assert results[0.0]["draft_tokens"] > 0
    assert results[0.0]["accepted_draft_tokens"] == 0
    assert results[0.0]["tokens_per_step"] == 1
    assert results[1.0]["acceptance_rate"] == 1
    assert results[1.0]["tokens_per_step"] > 4.5  # fewer than four drafts fit at the end
    mean = 1 + sum(0.7**k for k in range(1, 5))
    assert results[0.7]["tokens_per_step"] == pytest.approx(mean, abs=0.3)
    assert "tokens per step of a decoding request" in capsys.readouterr().out


def test_acceptance_out_of_range(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in (
        (["--acceptance", "1.5"], "must be between 0 and 1"),
        (["--acceptance", "0.5", "--drafts", "0"], "must be at least 1"),
        (["--acceptance", "0.5", "--compare", "transformers"], "leave out --acceptance"),
    ):
        with pytest.raises(SystemExit):
            main(["offline", f"model={path}", *words])
        assert message in capsys.readouterr().err
