"""The outputs in the chapters are those of their code, and the checks of their text pass.

Each page runs in a process of its own, forked from one that has imported torch. ``make pages`` writes the outputs.
"""

from __future__ import annotations

import ast
import builtins
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from minisgl.chapters.site.__main__ import course
from minisgl.chapters.site.render import pages_to_render
from minisgl.chapters.site.rendered import units

ROOT = Path(__file__).resolve().parents[2]
CHAPTERS = [path for path, _ in course(ROOT)]


PROGRAM = """
import os, sys
from minisgl.chapters.site import render

render.prepare()  # the environment, which some modules read when they are imported
import hydra, minisgl.llm, torch

for line in sys.stdin:
    page, said = line.rstrip("\\n").split("\\t")
    if child := os.fork():
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        continue
    status = 1
    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for descriptor in (1, 2):
            os.dup2(os.open(said, os.O_WRONLY | os.O_APPEND | os.O_CREAT), descriptor)
        status = render.main(["--check", page])
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
"""
"""Reads lines with a page and a file. Renders each page in a forked process, whose output is written to the file."""


@pytest.fixture(scope="module")
def renderer() -> Iterator[subprocess.Popen[str]]:
    """Start the process that renders pages."""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", PROGRAM], cwd=ROOT, stdin=pipe, stdout=pipe, text=True) as process:
        yield process


@pytest.mark.parametrize("page", [page.relative_to(ROOT).as_posix() for page in pages_to_render()])
def test_page_has_the_output_of_its_code(page: str, renderer: subprocess.Popen[str], tmp_path: Path) -> None:
    assert renderer.stdin is not None
    assert renderer.stdout is not None
    print(page, tmp_path / "said", sep="\t", file=renderer.stdin, flush=True)
    status = renderer.stdout.readline().strip()
    assert status == "0", (tmp_path / "said").read_text("utf-8")


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
