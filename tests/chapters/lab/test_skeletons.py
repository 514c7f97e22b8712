"""Skeletons: the committed files equal what the shipped plugins give, and a student's work is never overwritten."""

from __future__ import annotations

import ast
import dataclasses
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from minisgl.chapters.lab import skeletons
from minisgl.chapters.lab.catalog import Lab, Part, find, labs
from minisgl.chapters.lab.folder import Folder
from minisgl.chapters.lab.generate import files
from minisgl.chapters.lab.skeletons import regions, skeleton, solution, source, without_omitted
from minisgl.config import ConfigError

ROOT = Path(__file__).resolve().parents[3]
WITH_PLUGIN = [lab.lab for lab in labs() if lab.plugin]

PLUGIN = '''"""`cache=big`: a cache of Big things."""

from __future__ import annotations

import heapq


class BigCache:
    """Keeps Big things."""

    name = "big"

    # lab: toy.get
    def get(self, key: str) -> str:
        """Get what is there; see `BigCache`."""
        # This comment goes with the code.
        found = self.kept
        # 1. Ask first:
        #    then look.
        if found:
            # 2. Never twice.
            return found[key]
        return heapq.nsmallest(1, found)[0]

    # lab: end

    def put(self, key: str) -> BigCache:
        before = 1
        # lab: toy.put
        # 1. Count it.
        after = before + 1
        # lab: end
        return BigCache if "big" == "BigCache" else after


def minisgl_configs():
    yield "cache", "big", BigCache
'''

EXPECTED = '''

from __future__ import annotations

import heapq


class MyCache:
    """Keeps Big things."""

    name = "mine"

    def get(self, key: str) -> str:
        """Get what is there; see `BigCache`."""
        # TODO toy.get
        # 1. Ask first:
        #    then look.
        # 2. Never twice.
        raise NotImplementedError

    def put(self, key: str) -> MyCache:
        before = 1
        # TODO toy.put
        # 1. Count it.
        raise NotImplementedError
        return MyCache if "mine" == "BigCache" else after


def minisgl_configs():
    yield "cache", "mine", MyCache
'''


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Lab:
    """Return a lab whose reference is `PLUGIN`."""
    monkeypatch.setattr(skeletons, "source", lambda lab: PLUGIN)
    parts = (Part("toy.get", "get", ("a", "b")), Part("toy.put", "put", ("a", "b")))
    return Lab("toy", "00", "A toy", "Play.", "cache", "toy", "big", renames={"BigCache": "MyCache"}, parts=parts)


def test_skeleton(toy: Lab) -> None:
    """The code between markers becomes a TODO, and names are replaced token by token."""
    text = skeleton(toy)
    assert text[text.index("0)\n") + 2 :] == EXPECTED
    assert text.startswith('"""Lab toy: A toy.\n')
    assert "plugins=my_toy.py cache=mine" in text


def test_solved_part(toy: Lab) -> None:
    """A solved part keeps the reference's code."""
    text = skeleton(toy, ["toy.put"])
    assert "after = before + 1" in text
    assert text.count("NotImplementedError") == 1
    assert "NotImplementedError" not in solution(toy)
    assert "# lab:" not in solution(toy)


@pytest.mark.parametrize(
    "text", ["# lab: a\nx = 1\n", "x = 1\n# lab: end\n", "# lab: a\n# lab: b\nx = 1\n# lab: end\n"]
)
def test_unpaired_markers(text: str) -> None:
    """Markers without a partner are refused."""
    with pytest.raises(ValueError, match=r"line|part"):
        regions(text)


def test_omitted_regions() -> None:
    """Omitted regions are in no skeleton and no solution."""
    text = "a = 1\n    # lab: omit\n    b = 2\n    # lab: end\n# lab: toy.c\nc = 3\n# lab: end\n"
    assert without_omitted(text) == "a = 1\n# lab: toy.c\nc = 3\n# lab: end\n"
    for wrong in ("# lab: omit\nb = 2\n", "# lab: omit\n# lab: toy.c\n# lab: end\n", "# lab: omit\n# lab: omit\n"):
        with pytest.raises(ValueError, match="lab: omit"):
            without_omitted(wrong)
    for made in (skeleton(find("radix")), solution(find("radix"))):
        assert "lab: omit" not in made and "compare: str" not in made and "pick_common_pages" not in made


@pytest.mark.parametrize("name", WITH_PLUGIN)
def test_parts_of_plugins(name: str) -> None:
    """The markers of a shipped plugin are the parts of its lab, and each part has numbered comments."""
    lab = find(name)
    assert {region.part for region in regions(source(lab))} == {part.name for part in lab.parts}
    ast.parse(skeleton(lab))
    ast.parse(solution(lab))
    for part in lab.parts:
        assert f"# TODO {part.name}" in skeleton(lab)
        assert "# 1. " in skeleton(lab).split(f"# TODO {part.name}")[1].split("NotImplementedError")[0], part.name


def test_generated_files() -> None:
    """The committed skeletons and the reference page are up to date."""
    made = files()
    for name, text in made.items():
        path = ROOT / name
        assert path.is_file() and path.read_text("utf-8") == text, f"{name} is stale: run `make reference`"
    kept = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("chapters/*/skeletons/*.py")}
    assert kept == {name for name in made if name.endswith(".py")}


def test_skeletons_pass_ruff() -> None:
    """The committed skeletons pass ruff."""
    ruff = shutil.which("ruff", path=str(Path(sys.executable).parent)) or shutil.which("ruff")
    assert ruff is not None, "this test needs ruff"
    kept = sorted(ROOT.glob("chapters/*/skeletons/*.py"))
    assert kept
    for command in (["format", "--check"], ["check"]):
        result = subprocess.run([ruff, *command, *kept], capture_output=True, text=True, check=False, cwd=ROOT)
        assert result.returncode == 0, result.stdout + result.stderr


def test_start_keeps_files(tmp_path: Path) -> None:
    """`start` never overwrites a file, and says so if the file comes from an older skeleton."""
    folder, lab = Folder(tmp_path), find("policy")
    (path,) = folder.start(lab)
    assert path.read_text() == skeleton(lab)
    path.write_text(path.read_text() + "# mine\n")
    with pytest.raises(ConfigError, match=r"exists already.*Grade it"):
        folder.start(lab)
    with pytest.raises(ConfigError, match="older than this minisgl"):
        folder.start(dataclasses.replace(lab, title="Another title"))
    path.write_text("work\n")
    with pytest.raises(ConfigError, match="move it away"):
        folder.start(lab)
    assert path.read_text() == "work\n"
