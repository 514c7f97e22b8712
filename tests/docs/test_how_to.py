"""The how-to pages: their commands work on the examples that they show, and the kits reject a broken example."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from minisgl.course.site.blocks import Block, blocks

ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    "add-a-model": "add_a_model",
    "add-an-attention-backend": "add_an_attention_backend",
    "add-a-draft-model": "add_a_draft_model",
}
"""Page → folder of its example."""
BROKEN = [
    ("add_a_model", "gemma2.py", "if local and", "if False and", "the logits of position 9 are off"),
    ("add_a_model", "gemma2.py", "1 + self.weight", "self.weight", "the logits of position 0 are off"),
    ("add_a_model", "gemma2.py", "self.comm.all_reduce(y)", "y", "rank 0 of 2: the logits"),
    ("add_an_attention_backend", "rowwise.py", "[:length]", "", "is off by"),
    ("add_an_attention_backend", "rowwise.py", "key <= query", "key < query", "is off by"),
    ("add_an_attention_backend", "rowwise.py", "if layer.window >= 0", "if layer.window > 1000", "is off by"),
    ("add_a_draft_model", "draft_model.py", "int(same.argmin())", "len(computed)", "without kept KV it gets"),
    (
        "add_a_draft_model",
        "draft_model.py",
        "columns, pages  #",
        "columns, pages % columns  #",
        "without kept KV it gets",
    ),
]
"""Folder, file, a text in it, its replacement, and what a kit then says."""


def shown(page: str) -> list[Block]:
    """Return the blocks of a page that a reader would type or run."""
    found = blocks((ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8"))
    return [b for b in found if not {"quote", "skip"} & b.options.keys()]


def run(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command with this interpreter's programs."""
    env = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    return subprocess.run(
        ["bash", "-c", command], cwd=folder, env=env, capture_output=True, text=True, timeout=200, check=False
    )


def test_every_include_names_a_file() -> None:
    """A formatter that takes an include for Python breaks it: the page would show the line itself."""
    pages = [*(ROOT / "docs").glob("**/*.md"), *(ROOT / "chapters").glob("**/*.md")]
    for page in pages:
        for line in re.findall(r"^.*-- ?8 ?<.*$", page.read_text("utf-8"), re.MULTILINE):
            named = re.fullmatch(r' *--8<-- "([^":]+)(?::\S+)?"', line)
            assert named is not None and (ROOT / "docs" / named[1]).is_file(), f"{page}: {line}"


@pytest.mark.parametrize("page", PAGES)
def test_the_page_shows_every_file_of_its_example(page: str) -> None:
    included = {
        (b.options["title"], *re.findall(r'^--8<-- "(.+)"$', b.code, re.MULTILINE))
        for b in shown(page)
        if "title" in b.options
    }
    files = (ROOT / "docs" / "examples" / PAGES[page]).glob("*.py")
    assert included == {(file.name, f"examples/{PAGES[page]}/{file.name}") for file in files}


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_the_page_work(page: str, tmp_path: Path) -> None:
    for file in (ROOT / "docs" / "examples" / PAGES[page]).glob("*.py"):
        shutil.copy(file, tmp_path)
    commands = [line for b in shown(page) if b.language == "bash" for line in b.code.splitlines()]
    assert any("pytest" in command for command in commands)
    for command in commands:
        done = run(command, tmp_path)
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"


@pytest.mark.parametrize(("folder", "name", "text", "replacement", "says"), BROKEN)
def test_the_kit_rejects_a_broken_example(
    folder: str, name: str, text: str, replacement: str, says: str, tmp_path: Path
) -> None:
    for file in (ROOT / "docs" / "examples" / folder).glob("*.py"):
        shutil.copy(file, tmp_path)
    code = (tmp_path / name).read_text(encoding="utf-8")
    assert text in code
    (tmp_path / name).write_text(code.replace(text, replacement), encoding="utf-8")
    done = run("python -m pytest -q -x test_*.py", tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert says in done.stdout
