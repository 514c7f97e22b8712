"""The offline benchmark: what it measures is what happened, and a run beside transformers agrees with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from minisgl.bench.__main__ import main
from minisgl.bench.measure import Meter, run
from minisgl.bench.workload import Ask, parse_range, random_asks, read_asks
from minisgl.config import ConfigError
from minisgl.core import EngineSpec, SamplingParams
from minisgl.plugins.cache.radix import RadixCache
from minisgl.plugins.scheduler.prefill_first import PrefillFirstPolicy
from minisgl.scheduler.scheduler import Scheduler
from minisgl.testing import Ask as SimAsk
from minisgl.testing import SimEngine
from minisgl.testing.checkpoints import tiny_checkpoint


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("qwen3", tmp_path_factory.mktemp("bench"), tokenizer=True)


def test_a_report_with_transformers_beside_it(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "report.json"
    words = f"offline model={path} device=cpu num_pages=256 --requests 9 --input 5:40 --output 3:12 --shared 32"
    main([*words.split(), "--compare", "transformers", "--json", str(out)])
    report = json.loads(out.read_text())
    ours, theirs = report["minisgl"], report["transformers"]
    asks = random_asks(9, (5, 40), (3, 12), 320, 0, shared=32)
    assert ours["requests"] == 9
    assert ours["prompt_tokens"] == sum(len(ask.prompt) for ask in asks)
    assert ours["output_tokens"] == theirs["output_tokens"] == sum(ask.output for ask in asks)
    assert theirs["same_outputs"] == 9
    # Everything but the last token of each request is computed once, or was in the cache.
    assert ours["computed_tokens"] == ours["prompt_tokens"] + ours["output_tokens"] - 9 - ours["cached_tokens"]
    assert ours["cached_tokens"] >= 8 * 32
    assert ours["output_tokens_per_second"] == pytest.approx(ours["output_tokens"] / ours["seconds"])
    assert report["machine"]["dtype"] == "float32"
    printed = capsys.readouterr().out
    assert "times transformers' throughput; 9 of 9 outputs equal" in printed
    assert "worst gap" in printed


def test_counts_on_the_simulated_engine() -> None:
    """Two requests whose steps can be counted by hand: chunks of 8, prefill first."""
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    asks = [Ask(list(range(10)), 4), Ask(list(range(50, 74)), 4)]
    requests = {i: SimAsk(ask.prompt, params) for i, ask in enumerate(asks)}
    engine = SimEngine(EngineSpec(4, 64, 8, 128, 1000), requests, depth=1)
    meter = Meter(engine)
    scheduler = Scheduler(meter, RadixCache(4), PrefillFirstPolicy("fcfs"), max_prefill_tokens=8, overlap=False)
    result, tokens = run(scheduler, meter, asks, lambda i: params)
    assert [len(t) for t in tokens.values()] == [4, 4]
    assert result.computed_tokens == 10 + 24 + 2 * 3
    assert result.steps == engine.counts.steps
    assert result.cached_tokens == result.retractions == 0
    # The first request's first token comes with 2 of its own and 6 of the other's prompt; until its second, the
    # other's 18 left are computed, and a decode step of two rows.
    assert result.worst_gap_tokens == 18 + 2
    assert 0 < result.ttft_p50 <= result.ttft_p99 <= result.seconds
    again, _ = run(scheduler, meter, asks[:0], lambda i: params)
    assert (again.requests, again.steps, again.output_tokens) == (0, 0, 0)


def test_requests_from_a_file(path: Path, tmp_path: Path) -> None:
    file = tmp_path / "requests.jsonl"
    file.write_text('{"prompt": [5, 6], "max_tokens": 3}\n\n{"prompt": [7]}\n')
    assert read_asks(file, None, 9) == [Ask([5, 6], 3), Ask([7], 9)]
    out = tmp_path / "report.json"
    main(["offline", f"model={path}", "device=cpu", "num_pages=64", "--file", str(file), "--output", "4",
          "--temperature", "0.7", "--json", str(out)])  # fmt: skip
    assert json.loads(out.read_text())["minisgl"]["output_tokens"] == 3 + 4


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"max_tokens": 3}', "requests.jsonl:1 is no request"),
        ("{", "requests.jsonl:1 is no request"),
        ("", "holds no request"),
        ('{"prompt": "hi"}', "no tokenizer"),
    ],
)
def test_a_wrong_file_says_where(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "requests.jsonl"
    file.write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_asks(file, None, 9)


@pytest.mark.parametrize("text", ["", "x", "5:2", "0:3", "1:2:3"])
def test_a_wrong_range(text: str) -> None:
    with pytest.raises(ConfigError, match="is no range of tokens"):
        parse_range(text)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nothing"], "there is no benchmark 'nothing'"),
        (["offline", "--compare", "transformers", "--temperature", "1"], "--compare runs greedily"),
        (["offline", "model=/nowhere"], "model=/nowhere: there is no such directory"),
        (["offline", "--requests", "0", "model={path}", "device=cpu", "num_pages=9"], "--requests 0: at least 1"),
    ],
)
def test_wrong_words_end_with_status_2(
    words: list[str], message: str, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main([word.format(path=path) for word in words])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err
