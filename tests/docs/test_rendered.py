"""The outputs in the chapters are those of their code, and the checks of their text pass.

Each page runs in a process of its own. ``make pages`` writes the outputs again.
"""

from __future__ import annotations

import ast
import builtins
import subprocess
import sys
from pathlib import Path

import pytest

from minisgl.chapters.site.__main__ import course
from minisgl.chapters.site.render import mask, pages_to_render
from minisgl.chapters.site.rendered import units

ROOT = Path(__file__).resolve().parents[2]
CHAPTERS = [path for path, _ in course(ROOT)]


@pytest.mark.parametrize("page", [page.relative_to(ROOT).as_posix() for page in pages_to_render()])
def test_page_has_the_output_of_its_code(page: str) -> None:
    command = [sys.executable, "-m", "minisgl.chapters.site.render", "--check", page]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_chapter_is_rendered() -> None:
    assert set(CHAPTERS) <= {page.relative_to(ROOT).as_posix() for page in pages_to_render()}


def bound(tree: ast.AST) -> set[str]:
    """Return the names that a block binds: variables, functions, classes, arguments and modules."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            names.add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ExceptHandler) and node.name:
            names.add(node.name)
    return names


@pytest.mark.parametrize("page", [page.relative_to(ROOT).as_posix() for page in pages_to_render()])
def test_shown_blocks_need_no_hidden_block(page: str) -> None:
    """A reader who runs the blocks of a page in order has every name that they use."""
    known: dict[str, set[str]] = {}
    for unit in units((ROOT / page).read_text("utf-8")):
        options = unit.block.options
        if unit.hidden or unit.block.language != "python" or "exec" not in options:
            continue
        tree = ast.parse(unit.block.code)
        names = known.setdefault(options.get("session", f"line {unit.block.line}"), set(dir(builtins)) | {"__file__"})
        names |= bound(tree)
        used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        assert used <= names, f"line {unit.block.line} uses {sorted(used - names)}, which no shown block defines"


def test_a_longer_time_may_break_its_line() -> None:
    """The output of a slow machine is that of the page, wherever its line is broken before or after a time."""
    lines = (
        "first token after 120 ms, at 779 tok/s)",
        "after 1169 ms, at 104\ntok/s)",
        "after 1169 ms, at\n104 tok/s)",
    )
    short, *broken = (f"(204 tokens, first token {line.removeprefix('first token ')}\n# end" for line in lines)
    for varies in ("", r"\d+ tok/s"):
        assert {mask(text, varies) for text in (short, *broken)} == {mask(short, varies)}
        assert mask(short.replace("204", "205"), varies) != mask(short, varies)
