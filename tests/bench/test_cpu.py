"""`bench cpu` measures each row in a separate process, with a GGUF file that it wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from minisgl.bench import cpu

SHAPE = {
    "model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96, "vocab_size": 512, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 1024, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip


def test_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("gguf")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cpu, "shape_of", lambda name: SHAPE)
    monkeypatch.setattr(cpu, "read_bandwidth", lambda: 1.0)
    cpu.main(["--rounds", "1", "--rows", "minisgl Q4_0", "--json", str(tmp_path / "out.json")])
    report: dict[str, Any] = json.loads((tmp_path / "out.json").read_text())
    (row,) = report["rows"].values()
    assert set(row) >= set(cpu.COLUMNS) - {"memory"} and all(value > 0 for value in row.values())
    assert "minisgl Q4_0" in capsys.readouterr().out


def test_wrong_arguments_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in (
        (["--rounds", "0"], "must be at least 1"),
        (["--rows", "none such"], "no row has a name"),
        (["--shape", "none"], "there is no shape of this name"),
    ):
        with pytest.raises(SystemExit):
            cpu.main(words)
        assert message in capsys.readouterr().err
