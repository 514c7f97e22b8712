"""Synthetic acceptance: which tokens become output, and the benchmark of speculation."""

from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from minisgl.bench import speculation
from minisgl.bench.__main__ import main
from minisgl.bench.measure import Meter, run
from minisgl.bench.synthetic import SyntheticProposer, force_acceptance
from minisgl.bench.workload import random_requests
from minisgl.core import Req, SamplingParams
from minisgl.engine.build import start_engine
from minisgl.engine.sampler import Sampler
from minisgl.options.compose import compose
from minisgl.plugin_manager.manager import PluginManager
from minisgl.scheduler.build import build_scheduler
from minisgl.testing.checkpoints import tiny_checkpoint
from minisgl.testing.oracle import Oracle


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("qwen3", tmp_path_factory.mktemp("bench"), tokenizer=True)


def test_the_sampler_has_the_engines_kernels(path: Path) -> None:
    """The sampler that forces drafts is converted as the one that it replaces was."""
    manager = PluginManager.load()
    engine = start_engine(compose(manager, [f"model={path}", "device=cpu", "num_pages=16"]), manager)
    converted: list[Sampler] = []
    try:
        with patch.object(engine.kernels, "convert_sampler", converted.append):
            force_acceptance(engine, 0.6)
        assert converted == [engine.model_runner.sampler]
    finally:
        engine.close()


@pytest.mark.parametrize("tp", [1, 2])
def test_accepted_drafts_are_the_output(path: Path, tp: int) -> None:
    """Each token is the draft for its position, or the model's choice after the tokens before it."""
    manager = PluginManager.load()
    config = compose(manager, [f"model={path}", "device=cpu", "num_pages=128", f"tp={tp}"])
    requests = random_requests(4, (10, 20), (40, 60), 320, 3)
    engine = start_engine(config, manager)
    try:
        force_acceptance(engine, 0.6)
        meter, proposer = Meter(engine), SyntheticProposer(engine.spec, 4)
        scheduler = build_scheduler(config, manager, meter, proposer=proposer, adapt_drafts=False)
        params = [SamplingParams(max_tokens=r.output_len, temperature=0.0, ignore_eos=True) for r in requests]
        result, tokens = run(scheduler, meter, requests, params.__getitem__)
    finally:
        manager.close()
        engine.close()
    assert 0.25 < result.acceptance_rate < 0.45  # (0.6 + 0.6² + 0.6³ + 0.6⁴) / 4
    oracle, drafted, chosen = Oracle(path), 0, 0
    for uid, request in enumerate(requests):
        prompt, output = request.prompt_ids, tokens[uid]
        assert len(output) == request.output_len
        with torch.no_grad():
            logits = oracle.model(torch.tensor([[*prompt, *output]])).logits[0, len(prompt) - 1 : -1]
        (drafts,) = proposer.propose([Req(uid, prompt, params[uid], uid)], [len(prompt)], [len(output)])
        for token, draft, row in zip(output, drafts, logits, strict=True):
            if token == draft:
                drafted += 1
            else:
                assert row.max() - row[token] < 1e-4
                chosen += 1
    assert drafted >= result.accepted_draft_tokens > 20
    assert chosen > 20


def test_the_rows(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "report.json"
    words = "--requests 1 3 --acceptance 0 1 --drafts 3 --input 8 --output 24 --rounds 2 --temperature 0.9"
    main(["speculation", f"model={path}", "device=cpu", "num_pages=128", *words.split(), "--json", str(out)])
    rows = json.loads(out.read_text())["rows"]
    assert [(row["requests"], row["name"]) for row in rows] == [
        (n, name) for n in (1, 3) for name in ("none", "0 %", "100 %", "no match")
    ]
    for row in rows:
        assert len(row["rounds"]) == 2
        for result in row["rounds"]:
            assert result["output_tokens"] == 24 * row["requests"]
            if row["name"] in ("none", "no match"):
                assert result["draft_tokens"] == 0
            elif row["acceptance"] is not None:
                assert result["acceptance_rate"] in (row["acceptance"], 0)
    assert any(result["draft_tokens"] for row in rows for result in row["rounds"])
    assert rows[0]["relative"] == 1
    assert rows[0]["goal"] is None
    printed = capsys.readouterr()
    assert "no match" in printed.out
    assert "round 2: 3 requests, no match" in printed.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rounds", "0"], "--rounds 0"),
        (["--requests", "0"], "--requests"),
        (["--acceptance", "2"], "between 0 and 1"),
    ],
)
def test_wrong_arguments(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["speculation", *words])
    assert message in capsys.readouterr().err


def test_goals() -> None:
    """An absolute goal for one model only, and relative ones for all."""
    manager = PluginManager.load()
    for model, goals in (
        ("qwen3-14b", ["≥ 0.95 × none", "≥ 1.00 × none", "≥ 350 tok/s", "≥ 0.98 × none"]),
        ("qwen3-0.6b", ["≥ 0.95 × none", "≥ 1.00 × none", "≥ 1.00 × none", "≥ 0.98 × none"]),
    ):
        rows = speculation.table_rows(speculation.parser().parse_args([]), compose(manager, [f"model={model}"]))
        assert [row.goal and row.goal.text for row in rows][1:5] == goals
