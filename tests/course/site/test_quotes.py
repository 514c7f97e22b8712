"""Quotes by symbol: what is shown, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from minisgl.course.site import blocks
from minisgl.course.site.quotes import MOST_LINES, QuoteError, expand, find, quoted_files

SOURCE = '''"""A file."""

LIMIT = 3
most: int = 4


@decorated
def outer():
    """Doc."""
    # lab: part.one
    # 1. Why.
    first = 1
    # lab: end

    return first


class Thing:
    size: int = 0

    def act(self):
        return 1
'''


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "a.py").write_text(SOURCE)
    (tmp_path / "b.yaml").write_text("one: 1\ntwo: 2\n")
    (tmp_path / "long.py").write_text("x = (\n" + "1,\n" * MOST_LINES + ")\n")
    return tmp_path


def test_a_function_comes_with_its_decorator_and_without_lab_markers(root: Path) -> None:
    quote = find(root, "a.py::outer")
    assert quote.first == 7
    assert quote.text == '@decorated\ndef outer():\n    """Doc."""\n    # 1. Why.\n    first = 1\n\n    return first'


def test_methods_constants_fields_and_whole_files(root: Path) -> None:
    assert find(root, "a.py::Thing.act").text == "def act(self):\n    return 1"
    assert find(root, "a.py::LIMIT").text == "LIMIT = 3"
    assert find(root, "a.py::most").text == "most: int = 4"
    assert find(root, "a.py::Thing.size") == ("a.py", "Thing.size", 19, "size: int = 0")
    assert find(root, "b.yaml").text == "one: 1\ntwo: 2"
    assert find(root, "b.yaml", "2-2") == ("b.yaml", "", 2, "two: 2")
    assert find(root, "a.py::Thing", "4-5").text == "def act(self):\n    return 1"


@pytest.mark.parametrize(
    ("target", "lines", "says"),
    [
        ("a.py::Thing.gone", None, "there is no gone; there are act, size"),
        ("a.py::gone", None, "there are LIMIT, Thing, most, outer"),
        ("gone.py::x", None, "there is no file gone.py"),
        ("a.py::Thing", "2-9", "it has 5 lines"),
        ("long.py", None, f"at most {MOST_LINES}"),
    ],
)
def test_what_is_not_there_is_refused(root: Path, target: str, lines: str | None, says: str) -> None:
    with pytest.raises(QuoteError, match=says):
        find(root, target, lines)


def test_a_page_with_quotes(root: Path) -> None:
    example = '````text\n```python quote="a.py::most"\n```\n````\n'
    page = f'Text.\n\n- item\n\n    ```python quote="a.py::LIMIT"\n    ```\n\n{example}'
    assert quoted_files(page) == {"a.py"}
    shown = blocks.map_blocks(page, lambda block: expand(block, root, lambda quote: f"<{quote.first}>"))
    assert "    ```python\n    LIMIT = 3\n    ```\n    <3>" in shown
    assert '```python quote="a.py::most"' in shown  # an example inside a longer fence


@pytest.mark.parametrize(
    ("block", "says"),
    [
        ('```python quote="a.py::LIMIT"\nLIMIT = 2\n```\n', "stays empty"),
        ('```python quote="a.py" x="1"\n```\n', "not x"),
    ],
)
def test_a_quote_holds_nothing_of_its_own(root: Path, block: str, says: str) -> None:
    with pytest.raises(QuoteError, match=says):
        blocks.map_blocks(block, lambda b: expand(b, root, lambda quote: ""))


def test_escaped_pipes_in_code_are_pipes() -> None:
    assert blocks.plain_pipes(r"| `int \| None` | a \| b |") == r"| `int | None` | a \| b |"


def test_a_skipped_block_says_why() -> None:
    shown = blocks.map_blocks('```bash skip="it takes an hour"\nwait\n```\n', blocks.say_what_is_skipped)
    assert shown.startswith("```bash\nwait\n```\n")
    assert "not run by the tests: it takes an hour" in shown
    assert blocks.map_blocks("```bash\nwait\n```\n", blocks.say_what_is_skipped) == "```bash\nwait\n```\n"
