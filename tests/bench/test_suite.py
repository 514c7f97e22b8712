"""The suite runs all workloads. Here it uses a small model on the CPU."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from minisgl.bench import suite
from minisgl.testing.checkpoints import tiny_checkpoint


def small(workload: suite.Workload) -> suite.Workload:
    return replace(workload, count=3, input=(5, 9), output=(1, 1) if workload is suite.PREFILL else (2, 4), shared=0)


def test_every_workload_has_new_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tiny_checkpoint("qwen3", tmp_path / "tiny"))
    known = {small(w): o for w, o in suite.KNOWN["qwen3-0.6b"].items()}
    monkeypatch.setattr(suite, "KNOWN", {path: known})
    out = tmp_path / "suite.json"
    suite.main(["device=cpu", "num_pages=64", "--models", path, "--json", str(out)])
    report = json.loads(out.read_text())
    rows = {row["workload"]: row for row in report["rows"]}
    assert set(rows) == {"start", "offline", "one request", "64 requests", "prefill", "shared prefix"}
    assert all(row["value"] > 0 for row in rows.values())
    assert rows["prefill"]["unit"] == "prompt tok/s"
    for row in report["rows"][1:]:
        assert row["result"]["requests"] == 3
        assert row["result"]["cached_tokens"] == 0, "a prefix of an earlier workload was in the cache"
    printed = capsys.readouterr().out
    assert "mini-sglang" in printed
    assert "29,000" in printed, "the goal of offline"


def test_a_model_in_fp8_is_compared_with_fp8() -> None:
    """Its limit follows from other bytes and FLOPs, and no other engine was measured with it."""
    for model, workloads in suite.KNOWN.items():
        for workload, known in workloads.items():
            assert suite.comparison_of(model, workload, "auto") == known
            in_fp8 = suite.comparison_of(model, workload, "fp8")
            assert in_fp8.mini_sglang is in_fp8.vllm is None
            assert in_fp8.limit is None or in_fp8.limit > (known.limit or 0)
    assert suite.comparison_of("qwen3-14b", suite.SINGLE, "fp8").goal == 230
    assert all(known.keys() <= suite.KNOWN[model].keys() for model, known in suite.KNOWN_FP8.items())


def test_unknown_model_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        suite.main(["--models", "gpt-5"])
    assert "qwen3-0.6b" in capsys.readouterr().err


def test_only_accepts_known_workloads_before_options(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    monkeypatch.setattr(suite, "measure", lambda *arguments: calls.append(arguments) or ([], {}))
    monkeypatch.setattr(suite, "show", lambda *_: None)
    suite.main(["--models", "qwen3-0.6b", "--only", "one request", "tp=2", "communicator=nccl"])
    assert calls == [("qwen3-0.6b", ["tp=2", "communicator=nccl"], ["one request"], 0)]
    with pytest.raises(SystemExit, match="2"):
        suite.main(["--only", "one requst"])
    assert "there is no workload one requst: use 64 decoding, 64 requests, offline" in capsys.readouterr().err
