"""Time to the first token by length: as many fresh prompts as were asked for, and each computed whole."""

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
from minisgl.testing import Ask, SimEngine


def test_every_prompt_is_computed_whole() -> None:
    """On the simulated engine, which checks each row against its own prompt."""
    lengths, repeat, vocab, seed = [5, 24], 4, 1000, 7
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    requests, uid = {}, 0
    for length in lengths:
        for ask in ttft.random_asks(ttft.WARM + repeat, (length, length), (1, 1), vocab, seed + uid):
            requests[len(requests)] = Ask(ask.prompt, params)
        uid += ttft.WARM + repeat
    engine = SimEngine(EngineSpec(4, 64, 8, 128, vocab), requests, depth=2)
    meter = Meter(engine)
    scheduler = Scheduler(meter, RadixCache(4), PrefillFirstPolicy("fcfs"), max_prefill_tokens=16, overlap=True)
    lines = ttft.measure(scheduler, meter, lengths, repeat, seed)
    assert [line.prompt_tokens for line in lines] == lengths
    assert all(0 < line.p50 <= line.slowest for line in lines)
    assert meter.computed == sum(lengths) * (ttft.WARM + repeat)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "ttft.json"
    ttft.main(["model=tutor", "device=cpu", "--input", "8", "30", "--repeat", "2", "--json", str(out)])
    report = json.loads(out.read_text())
    assert [line["prompt_tokens"] for line in report["ttft"]] == [8, 30]
    assert report["options"] == ["model=tutor", "device=cpu"]
    assert "Time to the first token, tutor on" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "says"),
    [(["--input", "0"], "at least 1"), (["--input", "9999", "model=tutor", "device=cpu"], "request 0")],
)
def test_what_can_not_be_measured(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        ttft.main(words)
    assert says in capsys.readouterr().err
