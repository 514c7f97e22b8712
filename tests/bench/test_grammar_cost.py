"""The benchmark of structured output compares rows of equal lengths, with and without a grammar."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from minisgl.bench import grammar


def test_each_schema_is_longer_than_the_answer() -> None:
    for text in grammar.schemas(12):
        schema = json.loads(text)
        jsonschema.Draft202012Validator.check_schema(schema)
        assert schema["minItems"] == 12
    assert len(set(grammar.schemas(12))) == 8


@pytest.mark.parametrize("plugin", ["plain", "llguidance"])
def test_command_line(plugin: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if plugin == "llguidance":
        pytest.importorskip("llguidance")
    out = tmp_path / "grammar.json"
    sizes = ["--rows", "8", "--tokens", "12", "--repeat", "1", "--grammars", plugin]
    grammar.main(["model=tutor", "device=cpu", *sizes, "--json", str(out)])
    report = json.loads(out.read_text())
    runs = report["runs"][plugin]
    assert (len(runs["with"]), len(runs["without"])) == (1, 1)
    assert min(runs["with"] + runs["without"]) > 0
    assert plugin in capsys.readouterr().out
