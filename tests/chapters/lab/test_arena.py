"""The arena: exact scores, entries that are out, and the command. `test_my_engine` serves the same files."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from minisgl.chapters.lab.arena import match as arena
from minisgl.chapters.lab.arena.match import Entry, draw_match, match, table
from minisgl.chapters.lab.arena.play import build
from minisgl.chapters.lab.arena.traces import KINDS, traces_of
from minisgl.chapters.lab.catalog import find
from minisgl.chapters.lab.child import ChildError
from minisgl.chapters.lab.cli import main
from minisgl.chapters.lab.skeletons import skeleton, solution
from minisgl.config import ConfigError

from .test_solutions import write
from .test_stretch import better

SEED = 5


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let only the reference play besides the files."""
    monkeypatch.setattr(arena, "BASELINES", {"policy": ("mixed",), "cache": ("radix",)})


def wrong(name: str, folder: Path) -> Path:
    """Write a seeded wrong solution, lab/stem, under a name of its own."""
    lab, stem = name.split("/")
    path = folder / f"{stem}.py"
    seed = Path(__file__).parent / f"solutions/{lab}/{stem}.py"
    (folder / "seed").mkdir(exist_ok=True)
    path.write_text(write(find(lab), seed, folder / "seed").read_text())
    return path


@pytest.mark.parametrize("kind", KINDS)
def test_traces_are_those_of_the_seed(kind: str) -> None:
    assert traces_of(kind, 1) == traces_of(kind, 1)
    assert all(a.asks != b.asks for a, b in zip(traces_of(kind, 1), traces_of(kind, 2), strict=True))


def test_a_file_plays_with_its_own_rules(tmp_path: Path) -> None:
    """A cache that beats the lab's number with `eviction=own` uses this option in a match, too."""
    own = tmp_path / "my_radix.py"
    own.write_text(better("radix"))
    assert build("cache", str(own), True)().credit == 1000  # 0 with the default of the option


def test_a_match_of_policies(tmp_path: Path, few: None) -> None:
    """The student's copy of `mixed` scores exactly 1; a policy that wastes steps scores worse; others are out."""
    own = tmp_path / "my_policy.py"
    own.write_text(solution(find("policy")))
    unwritten = tmp_path / "unwritten.py"
    unwritten.write_text(skeleton(find("policy")))
    slow = wrong("policy/wrong_decodes_or_prompts", tmp_path)
    entries = {e.name: e for e in match("policy", [str(own), str(slow), str(unwritten)], SEED)}
    assert entries["my_policy.py"].scores == [1.0] * len(KINDS["policy"])
    assert 1.02 < entries[slow.name].score < 10
    assert "NotImplementedError" in entries["unwritten.py"].out and not entries["unwritten.py"].scores
    shown = table("policy", list(entries.values()))
    assert re.search(r"^\* unwritten.py +out  NotImplementedError", shown, re.MULTILINE)
    ET.fromstring(draw_match("policy", list(entries.values()), SEED))


def test_a_cache_that_breaks_a_promise_is_out(tmp_path: Path, few: None) -> None:
    files = [
        wrong("radix/wrong_match_stops_at_whole_edges", tmp_path),
        wrong("radix/wrong_lock_only_the_end", tmp_path),
    ]
    found = {e.name: e for e in match("cache", list(map(str, files)), SEED)}
    assert found["radix"].score == 1.0
    assert found[files[0].name].score > 1.0 and not found[files[0].name].out
    assert found[files[1].name].out


def test_two_runs_of_a_seed_are_equal(few: None) -> None:
    first, second = (next(iter(match("cache", [], SEED))) for _ in range(2))
    assert first.played == second.played and first.played[0].computed > 0


def test_the_command(tmp_path: Path, few: None, capsys: pytest.CaptureFixture[str]) -> None:
    own = tmp_path / "my_radix.py"
    own.write_text(solution(find("radix")))
    assert main(["arena", "cache", str(own), "--seed", "3", "--dir", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "hidden traces of seed 3" in said and re.search(r"\* my_radix.py +1.000", said)
    ET.fromstring((tmp_path / "arena_cache.svg").read_text())
    with pytest.raises(SystemExit, match="2"):
        main(["arena", "cache", str(tmp_path / "none.py")])


def test_without_the_reference_there_is_no_scale(few: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is too slow for the reference gives no scores, instead of scores on another scale."""

    def ask(module: str, request: dict[str, Any], seconds: float) -> Any:
        raise ChildError("it was not done after 120 s")

    monkeypatch.setattr(arena, "ask_child", ask)
    with pytest.raises(ConfigError, match=r"mixed could not play.* 120 s.*busy"):
        list(arena.match("policy", ["my_policy.py"], 1))


def test_entries_are_sorted_by_their_score() -> None:
    entries = [
        Entry("bad", True, scores=[2.0, 2.0]),
        Entry("out", True, out="promise 3"),
        Entry("good", True, scores=[0.5, 2.0]),
    ]
    assert [e.name for e in sorted(entries, key=lambda e: e.score)] == ["good", "bad", "out"]
    assert entries[2].score == pytest.approx(1.0)
