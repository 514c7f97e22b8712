"""An error on a page fails the build of the site. The tests build a small site with one error on each page."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FAULTS = {
    "code": ('```python exec="on" result="text"\nraise ValueError("planted")\n```', "ValueError: planted"),
    "command": ('```bash exec="on" result="text"\nfalse\necho planted-command\n```', "echo planted-command"),
    "pipe": ('```bash exec="on" result="text"\n(echo planted-pipe; exit 3) | cat\n```', "unexpected code 3"),
    "symbol": ('```python quote="minisgl/core.py::Nowhere"\n```', "symbol.md, line 3: core.py::Nowhere"),
    "file": ('```python quote="minisgl/nowhere.py"\n```', "there is no file minisgl/nowhere.py"),
    "link": ("[text](nowhere.md)", "'nowhere.md', but the target is not found"),
    "anchor": ("[text](index.md#nowhere)", "does not contain an anchor '#nowhere'"),
    "snippet": ('--8<-- "nowhere.txt"', "SnippetMissingError"),
}


def build(folder: Path, pages: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Build a site of these pages, with the options of the real site except the navigation."""
    options, _, _ = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")
    nav = "".join(f"  - {name}.md\n" for name in ("index", "glossary", *pages))
    options = options.replace("watch: [chapters, plugins, minisgl]\n", "")
    (folder / "mkdocs.yml").write_text(f"{options}\nnav:\n{nav}", encoding="utf-8")
    (folder / "minisgl").symlink_to(ROOT / "minisgl")
    (folder / "chapters").mkdir()
    (folder / "chapters" / "site").symlink_to(ROOT / "chapters" / "site")
    shutil.copytree(ROOT / "docs" / "assets", folder / "docs" / "assets")
    for name, text in {"index": "", "glossary": "", **pages}.items():
        (folder / "docs" / f"{name}.md").write_text(f"# A page\n\n{text}\n", encoding="utf-8")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=600, check=False)


def test_correct_site_is_built(tmp_path: Path) -> None:
    quote = '```python quote="chapters/site/quotes.py::MAX_LINES"\n```'
    done = build(tmp_path, {"correct": f'{quote}\n\n```python exec="on" result="text"\nprint("seen" * 2)\n```'})
    assert done.returncode == 0, done.stderr
    assert " 4 of 4 pages rendered" in done.stderr and " 4 of 4 pages written" in done.stderr  # with a source listing
    page = (tmp_path / "site" / "correct.html").read_text(encoding="utf-8")
    assert "seenseen" in page
    assert 'href="source/chapters/site/quotes.py.html#__codelineno-0-' in page


@pytest.mark.parametrize("fault", [name for name in FAULTS if name != "snippet"])
def test_fault_fails_the_build(fault: str, faulty: subprocess.CompletedProcess[str]) -> None:
    assert faulty.returncode != 0
    assert FAULTS[fault][1] in faulty.stderr


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    """Build one site with all faults that do not stop the build at once."""
    return build(tmp_path_factory.mktemp("faults"), {k: text for k, (text, _) in FAULTS.items() if k != "snippet"})


def test_missing_snippet_fails_the_build(tmp_path: Path) -> None:
    text, message = FAULTS["snippet"]
    done = build(tmp_path, {"snippet": text})
    assert done.returncode != 0
    assert message in done.stderr
