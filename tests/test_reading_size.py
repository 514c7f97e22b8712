"""How much of the project a reader must open, so that the core stays small enough for an afternoon.

`python -m minisgl.testing.reading_size` measures, and prints the files. If a test fails, move out of the core what is
optional, or what only makes it faster: see "Which way dependencies point" in docs/architecture.md.
"""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from minisgl.testing.reading_size import OPTIONS, PLAIN, PLAIN_SERVER, ROOT, core_files, files_of_chat, lines

GENERATE = {PLAIN: (34, 6895), OPTIONS: (43, 7675)}
"""Options → the most files that a call of ``LLM.generate`` may run through, and the most lines in them."""
CHAT = {PLAIN_SERVER: (48, 9040), OPTIONS: (83, 14800)}
"""The same for a streamed chat over HTTP, in all processes of a server together."""
CORE_LINES = 12045
"""The most lines of ``minisgl`` without what is around the engine."""
LONG_FILES = 0
"""The most files of the core with more than 400 lines."""


def test_core_is_small() -> None:
    files = core_files()
    assert lines(files) <= CORE_LINES
    long = [str(path.relative_to(ROOT)) for path in files if lines([path]) > 400]
    assert len(long) <= LONG_FILES, long


@pytest.mark.parametrize("options", GENERATE, ids=["plain", "default"])
def test_generate_runs_through_few_files(options: tuple[str, ...]) -> None:
    """The call runs in another process, because other tests have used the engine in this one."""
    code = (
        f"from minisgl.testing.reading_size import files_of_generate; print(*files_of_generate({options}), sep='\\n')"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    files = [line for line in done.stdout.splitlines() if line.startswith(str(ROOT))]
    assert any(file.endswith("scheduler.py") for file in files), done.stdout  # the trace saw something
    most_files, most_lines = GENERATE[options]
    assert (len(files) <= most_files, lines(files) <= most_lines) == (True, True), (len(files), lines(files))


@pytest.mark.parametrize("options", CHAT, ids=["plain", "default"])
def test_chat_runs_through_few_files(options: tuple[str, ...]) -> None:
    files = files_of_chat(options)
    names = {file.rpartition("/")[2] for file in files}
    assert {"scheduler.py", "text_process.py", "dispatch.py"} <= names  # ranks, tokenizers and API server were seen
    most_files, most_lines = CHAT[options]
    assert (len(files) <= most_files, lines(files) <= most_lines) == (True, True), (len(files), lines(files))


def test_reading_order_names_the_files_and_their_lines() -> None:
    """docs/read-the-engine.md gives the lines of each file, to a tenth."""
    page = (ROOT / "docs" / "read-the-engine.md").read_text("utf-8")
    rows = re.findall(r"^\| \d+ \| `([^`]+)` \| (\d+) \|", page, re.MULTILINE)
    assert len(rows) == 10
    wrong = [
        (name, lines([ROOT / name])) for name, said in rows if abs(lines([ROOT / name]) - int(said)) > int(said) / 10
    ]
    assert wrong == []


def test_chapters_name_their_files_of_the_reading_order() -> None:
    """Each page with a lab says which of the ten files it is about, and where they are in the reading order."""
    page = (ROOT / "docs" / "read-the-engine.md").read_text("utf-8")
    files = dict(re.findall(r"^\| (\d+) \| `minisgl/([^`]+)` \|", page, re.MULTILINE))
    pages = [path for path in (ROOT / "chapters").glob("0*/*.md") if "\n## The lab" in path.read_text("utf-8")]
    assert len(pages) >= 10
    for path in pages:
        text = " ".join(path.read_text("utf-8").split())
        found = re.search(r"this chapter is about ([^:]+): files? ([^[]+) of \[Read the engine\]", text)
        if path.parent.name == "00_start":
            continue
        assert found is not None, path
        assert re.findall(r"`([^`]+)`", found[1]) == [files[number] for number in re.findall(r"\d+", found[2])], path
