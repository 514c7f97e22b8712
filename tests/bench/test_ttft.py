"""The benchmark of the time to the first token serves the given number of new prompts, none of them cached."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from minisgl.bench import ttft
from minisgl.bench.measure import Meter
from minisgl.core import EngineSpec, SamplingParams
from minisgl.plugins.cache.radix import RadixCache
from minisgl.plugins.scheduler.prefill_first import PrefillFirstPolicy
from minisgl.scheduler.scheduler import Scheduler
from minisgl.testing import SimEngine, SimRequest


def test_no_prompt_is_cached() -> None:
    """Run on the simulated engine, which checks each row against its own prompt."""
    lengths, repeat, vocab, seed = [5, 24], 4, 1000, 7
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    requests, uid = {}, 0
    for length in lengths:
        for request in ttft.random_requests(ttft.WARMUP + repeat, (length, length), (1, 1), vocab, seed + uid):
            requests[len(requests)] = SimRequest(request.prompt_ids, params)
        uid += ttft.WARMUP + repeat
    engine = SimEngine(EngineSpec(4, 64, 8, 128, vocab), requests, depth=2)
    meter = Meter(engine)
    scheduler = Scheduler(meter, RadixCache(4), PrefillFirstPolicy("fcfs"), max_prefill_tokens=16, overlap=True)
    lines = ttft.measure(scheduler, meter, lengths, repeat, seed)
    assert [line.prompt_tokens for line in lines] == lengths
    assert all(0 < line.p50 <= line.slowest for line in lines)
    assert meter.computed == sum(lengths) * (ttft.WARMUP + repeat)


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "ttft.json"
    ttft.main(["model=tutor", "device=cpu", "--input", "8", "30", "--repeat", "2", "--json", str(out)])
    report = json.loads(out.read_text())
    assert [line["prompt_tokens"] for line in report["ttft"]] == [8, 30]
    assert report["options"] == ["model=tutor", "device=cpu"]
    assert "Time to the first token, tutor on" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [(["--input", "0"], "must be at least 1"), (["--input", "9999", "model=tutor", "device=cpu"], "request 0")],
)
def test_wrong_lengths_are_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        ttft.main(words)
    assert message in capsys.readouterr().err
