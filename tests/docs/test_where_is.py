"""docs/where-is.md lists every module once, and every path and symbol that it names exists; design pages likewise."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "where-is.md").read_text(encoding="utf-8")
ANSWERS, _, MODULES = PAGE.partition("\n## Modules\n")
SYMBOL = re.compile(r"`([\w/.-]+\.py): ([\w.]+)`")
NAMED = re.compile(r"`((?:minisgl|plugins|conf|tests|docs|chapters)/[\w/.-]*)[`:]")
PAGES = ["where-is.md", *sorted(f"design/{page.name}" for page in (ROOT / "docs" / "design").glob("*.md"))]


def sections() -> dict[str, list[str]]:
    """Return the first cell of each row under "Modules", by heading."""
    found: dict[str, list[str]] = {}
    for part in re.split(r"^### ", MODULES, flags=re.MULTILINE)[1:]:
        heading, _, text = part.partition("\n")
        found[heading.strip()] = re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE)
    return found


def python_files(folder: str) -> list[Path]:
    """Return the Python files below a folder, except for files that hold nothing but a docstring."""
    files = sorted(path for path in (ROOT / folder).rglob("*.py") if "__pycache__" not in path.parts)
    return [path for path in files if len(ast.parse(path.read_text(encoding="utf-8")).body) > 1]


def has_symbol(path: Path, symbol: str) -> bool:
    """Return whether a file defines ``Class.method``, a class or a function."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    for name in symbol.split("."):
        node = next((n for n in body if getattr(n, "name", None) == name), None)
        if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            return False
        body = node.body
    return True


def test_every_module_is_listed_once() -> None:
    """Outside the course, and apart from plugins."""
    listed = [
        f"{heading}{name}" for heading, names in sections().items() if heading.startswith("minisgl/") for name in names
    ]
    there = [path.relative_to(ROOT).as_posix() for path in python_files("minisgl")]
    assert sorted(listed) == sorted(there)


def folders_of_plugins() -> list[str]:
    """Return the folders below those of a kind that have other modules than ``__init__.py``."""
    found = {path.parent.relative_to(ROOT).as_posix() + "/" for path in python_files("plugins") if path.stem[0] != "_"}
    return sorted(name for name in found if name.count("/") > 2)


@pytest.mark.parametrize("folder", folders_of_plugins())
def test_every_module_of_a_folder_of_plugins_is_listed_once(folder: str) -> None:
    """Its ``__init__.py`` may be left out."""
    listed, there = sections()[folder], {path.name for path in (ROOT / folder).glob("*.py")} - {"__init__.py"}
    assert sorted(name for name in listed if name != "__init__.py") == sorted(there)


def test_no_row_and_no_heading_is_there_twice() -> None:
    """A merge may leave both of two equal rows."""
    headings = re.findall(r"^#+ .+$", PAGE, re.MULTILINE)
    assert sorted(headings) == sorted(set(headings))
    for part in re.split(r"^#+ ", PAGE, flags=re.MULTILINE)[1:]:
        heading, _, text = part.partition("\n")
        firsts = re.findall(r"^\| (?!---)([^|]+) \|", text, re.MULTILINE)
        assert sorted(firsts) == sorted(set(firsts)), heading


def test_every_package_of_the_course_is_listed_once() -> None:
    course = ROOT / "chapters"
    packages = {path.parent.relative_to(course).as_posix() + "/" for path in course.glob("[a-z]*/**/*.py")}
    assert sorted(sections()["chapters/"]) == sorted(p for p in packages if "__pycache__" not in p)


def test_every_plugin_is_listed_once() -> None:
    text = MODULES.partition("### plugins/\n")[2].partition("\n### ")[0]
    listed = {kind: re.findall(r"`(\w+)`", rest) for kind, rest in re.findall(r"^\| `(\w+)/` \| (.+) \|", text, re.M)}
    there: dict[str, list[str]] = {}
    for path in sorted((ROOT / "plugins").glob("*/*.py")):
        if path.name != "__init__.py":
            there.setdefault(path.parent.name, []).append(path.stem)
    assert {kind: sorted(names) for kind, names in listed.items()} == there


def test_every_symbol_of_an_answer_exists() -> None:
    named = SYMBOL.findall(ANSWERS)
    missing = [f"{path}: {name}" for path, name in named if not has_symbol(ROOT / path, name)]
    assert len(named) > 40
    assert missing == []


@pytest.mark.parametrize("page", PAGES)
def test_every_path_of_a_page_exists(page: str) -> None:
    paths = NAMED.findall((ROOT / "docs" / page).read_text(encoding="utf-8"))
    assert [path for path in paths if not (ROOT / path).exists()] == []
