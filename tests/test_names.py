"""No retired name returns: `retired_names.toml` lists identifiers, options, metrics and words that 0.2.0 replaced."""

from __future__ import annotations

import io
import re
import subprocess
import tokenize
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
RETIRED = tomllib.loads((ROOT / "tests" / "retired_names.toml").read_text("utf-8"))
PATTERNS = RETIRED["patterns"]
HISTORY = (
    "CHANGELOG.md",
    "tests/retired_names.toml",
    "tests/test_names.py",
)
"""Files that speak of the old names on purpose."""
TRAINING_TEXT = "chapters/tutor"
"""The words of the embedded model's training text are not documentation."""
SUFFIXES = {".cpp", ".cu", ".html", ".js", ".md", ".py", ".toml", ".yaml", ".yml"}


@cache
def files() -> tuple[Path, ...]:
    """Every text file of the project, as git knows it; in a copy without git, all below the usual folders."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    ).stdout.split("\n")
    if not any(listed):
        folders = ("minisgl", "plugins", "conf", "chapters", "tests", "docs")
        listed = [path.relative_to(ROOT).as_posix() for name in folders for path in (ROOT / name).rglob("*")]
    paths = (ROOT / name for name in listed if name and name not in HISTORY)
    return tuple(path for path in paths if path.suffix in SUFFIXES and path.is_file())


def code_of(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, code): names and one-word strings of Python; elsewhere the text in backticks and code blocks."""
    text = path.read_text("utf-8")
    if path.suffix == ".py":
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.NAME or re.fullmatch(r"""(["'])\w+\1""", token.string):
                yield token.start[0], token.string
            elif token.type in (tokenize.STRING, tokenize.COMMENT):
                for match in re.finditer(r"`([^`\n]+)`", token.string):
                    yield token.start[0] + token.string.count("\n", 0, match.start()), match[1]
        return
    fenced = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif fenced or path.suffix != ".md":
            yield number, line
        else:
            yield from ((number, match[1]) for match in re.finditer(r"`([^`]+)`", line))


def prose_of(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, text): comments and strings of Python, and every line of other files."""
    text = path.read_text("utf-8")
    if path.suffix != ".py":
        yield from enumerate(text.splitlines(), 1)
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.STRING, tokenize.COMMENT):
            yield from enumerate(token.string.splitlines(), token.start[0])


def found(names: list[str], paths: list[Path]) -> list[str]:
    """Return ``file:line: name`` for each identifier of ``names`` in the code of ``paths``."""
    pattern = re.compile(rf"(?<![\w-])({'|'.join(map(re.escape, names))})(?![\w-])")
    return [
        f"{path.relative_to(ROOT) if path.is_relative_to(ROOT) else path}:{line}: {match[1]}"
        for path in paths
        for line, code in code_of(path)
        if (match := pattern.search(code))
    ]


def test_no_retired_identifier() -> None:
    assert found(RETIRED["names"], list(files())) == []


@pytest.mark.parametrize("part", RETIRED["scoped"])
def test_no_retired_identifier_in(part: str) -> None:
    paths = [path for path in files() if path.relative_to(ROOT).as_posix().startswith(part)]
    assert paths, f"{part}: there is no such part; correct tests/retired_names.toml"
    assert found(RETIRED["scoped"][part], paths) == []


@pytest.mark.parametrize("pattern", PATTERNS)
def test_no_retired_option_or_metric(pattern: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{number}: use {PATTERNS[pattern]}"
        for path in files()
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1)
        if re.search(pattern, line) and not path.is_relative_to(ROOT / "tests" / "options")
    ]
    assert wrong == []


def test_no_avoided_word() -> None:
    """The words are compared without regard to case, in comments, strings and pages."""
    pattern = re.compile(rf"\b({'|'.join(RETIRED['words'])})\b", re.IGNORECASE)
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {match[1]!r}; write: {RETIRED['words'][match[1].lower()]}"
        for path in files()
        if not path.is_relative_to(ROOT / TRAINING_TEXT)
        for line, text in prose_of(path)
        if (match := pattern.search(text))
    ]
    assert wrong == []


def test_the_search_finds_names(tmp_path: Path) -> None:
    python, page = tmp_path / "a.py", tmp_path / "b.md"
    python.write_text('twin = 1\n"""A `Seat` of twin."""\nx.epitaph\ngetattr(x, "settling")\n', "utf-8")
    page.write_text("A twin of `kv_len`.\n\n```python\nx.max_slots\n```\n", "utf-8")
    lines = [line.partition(tmp_path.name)[2] for line in found(RETIRED["names"], [python, page])]
    assert lines == ["/a.py:1: twin", "/a.py:2: Seat", "/a.py:3: epitaph", "/a.py:4: settling", "/b.md:1: kv_len",
                     "/b.md:4: max_slots"]  # fmt: skip
