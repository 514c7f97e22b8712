"""The how-to pages: their commands work on the examples that they show, and the kits reject a broken example."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from minisgl.chapters.site.blocks import Block, blocks
from minisgl.testing.serving import patient_timeout

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
    (
        "add_a_model",
        "phi3.py",
        "c.head_dim * c.rope.partial_rotary_factor",
        "c.head_dim",
        "short_factor of longrope has",
    ),
    ("add_a_model", "phi3.py", '"k_proj": ("qkv_proj", q,', '"k_proj": ("qkv_proj", 0,', "the logits of position"),
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
RUN_TESTS = """
import contextlib, io, json, os, sys
import pytest

results = []
for folder in sys.argv[1:]:
    folder = os.path.abspath(folder)
    sys.path.insert(0, folder)
    with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.chdir(folder):
        status = int(pytest.main(["-q", "-x", "-p", "no:cacheprovider", folder]))
    results.append([status, said.getvalue()])
    sys.path.remove(folder)
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(folder):
            del sys.modules[name]
print(json.dumps(results))
"""
"""Runs the tests in each of the folders, in one process: it imports torch and transformers once."""


def shown(page: str) -> list[Block]:
    """Return the blocks of a page that a reader would type or run."""
    found = blocks((ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8"))
    return [b for b in found if not {"quote", "skip"} & b.options.keys()]


def run(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command with this interpreter's programs."""
    env = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    limit = patient_timeout(200)
    return subprocess.run(
        ["bash", "-c", command], cwd=folder, env=env, capture_output=True, text=True, timeout=limit, check=False
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


@pytest.mark.parametrize("folder", sorted({folder for folder, *_ in BROKEN}))
def test_the_kit_rejects_a_broken_example(folder: str, tmp_path: Path) -> None:
    cases = [case for case in BROKEN if case[0] == folder]
    for i, (_, name, text, replacement, _) in enumerate(cases):
        copy = tmp_path / str(i)
        shutil.copytree(ROOT / "docs" / "examples" / folder, copy, ignore=shutil.ignore_patterns("__pycache__"))
        code = (copy / name).read_text(encoding="utf-8")
        assert text in code
        (copy / name).write_text(code.replace(text, replacement), encoding="utf-8")
    (tmp_path / "run.py").write_text(RUN_TESTS, encoding="utf-8")
    done = run(f"python run.py {' '.join(map(str, range(len(cases))))}", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(done.stdout)
    for (_, _, text, _, says), (status, said) in zip(cases, results, strict=True):
        assert status == pytest.ExitCode.TESTS_FAILED, f"with {text!r} replaced:\n{said}"
        assert says in said, f"with {text!r} replaced:\n{said}"
