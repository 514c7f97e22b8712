"""Numbers that stand in a chapter's prose are those that the code counts today."""

from __future__ import annotations

from pathlib import Path

from minisgl.bench import stages

ROOT = Path(__file__).parents[2]


def test_what_the_kv_cache_spares() -> None:
    counted = stages.count()
    text = (ROOT / "chapters/01_foundations/index.md").read_text()
    assert f"between {counted['without_cache']:,} and {counted['stages'][0]['computed']:,} tokens" in text


def test_what_one_line_of_the_first_policy_buys() -> None:
    mine = ROOT / "chapters/00_start/mine.py"
    words = [f"plugins={mine}", "scheduler=mine"]
    before = stages.count(words, [6])["stages"][0]["worst_gap"]
    text = (ROOT / "chapters/00_start/index.md").read_text()
    assert f"worst gap fell from {before:,} tokens to 128" in text
