"""Code quoted by symbol: the text that is shown, and the errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from minisgl.chapters.site import blocks
from minisgl.chapters.site.quotes import MAX_LINES, QuoteError, expand, find, quoted_files

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
    (tmp_path / "long.py").write_text("x = (\n" + "1,\n" * MAX_LINES + ")\n")
    return tmp_path


def test_function_has_decorator_but_no_lab_markers(root: Path) -> None:
    quote = find(root, "a.py::outer")
    assert quote.first == 7
    assert quote.text == '@decorated\ndef outer():\n    """Doc."""\n    # 1. Why.\n    first = 1\n\n    return first'


def test_methods_constants_fields_and_files(root: Path) -> None:
    assert find(root, "a.py::Thing.act").text == "def act(self):\n    return 1"
    assert find(root, "a.py::LIMIT").text == "LIMIT = 3"
    assert find(root, "a.py::most").text == "most: int = 4"
    assert find(root, "a.py::Thing.size") == ("a.py", "Thing.size", 19, "size: int = 0")
    assert find(root, "b.yaml").text == "one: 1\ntwo: 2"
    assert find(root, "b.yaml", "2-2") == ("b.yaml", "", 2, "two: 2")
    assert find(root, "a.py::Thing", "4-5").text == "def act(self):\n    return 1"


@pytest.mark.parametrize(
    ("target", "lines", "message"),
    [
        ("a.py::Thing.gone", None, "there is no gone; there are act, size"),
        ("a.py::gone", None, "there are LIMIT, Thing, most, outer"),
        ("gone.py::x", None, "there is no file gone.py"),
        ("a.py::Thing", "2-9", "it has 5 lines"),
        ("long.py", None, f"at most {MAX_LINES}"),
    ],
)
def test_wrong_targets_are_refused(root: Path, target: str, lines: str | None, message: str) -> None:
    with pytest.raises(QuoteError, match=message):
        find(root, target, lines)


def test_page_with_quotes(root: Path) -> None:
    example = '````text\n```python quote="a.py::most"\n```\n````\n'
    page = f'Text.\n\n- item\n\n    ```python quote="a.py::LIMIT"\n    ```\n\n{example}'
    assert quoted_files(page) == {"a.py"}
    shown = blocks.map_blocks(page, lambda block: expand(block, root, lambda quote: f"<{quote.first}>"))
    assert "    ```python\n    LIMIT = 3\n    ```\n    <3>" in shown
    assert '```python quote="a.py::most"' in shown  # the example inside a longer fence is unchanged


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ('```python quote="a.py" x="1"\n```\n', "not x"),
    ],
)
def test_wrong_quote_blocks_are_refused(root: Path, block: str, message: str) -> None:
    with pytest.raises(QuoteError, match=message):
        blocks.map_blocks(block, lambda b: expand(b, root, lambda quote: ""))


def test_old_copy_in_a_quote_is_replaced(root: Path) -> None:
    old = '```python quote="a.py::LIMIT"\nLIMIT = 2\n```\n'
    assert "LIMIT = 3" in blocks.map_blocks(old, lambda b: expand(b, root, lambda quote: ""))


def test_escaped_pipes_in_code() -> None:
    assert blocks.plain_pipes(r"| `int \| None` | a \| b |") == r"| `int | None` | a \| b |"


def test_reader_does_not_see_why_tests_skip_a_block() -> None:
    shown = blocks.map_blocks('```bash skip="it takes an hour"\nwait\n```\n', blocks.hide_skip_reason)
    assert shown == blocks.map_blocks("```bash\nwait\n```\n", blocks.hide_skip_reason) == "```bash\nwait\n```\n"


def test_quote_with_long_lines_is_smaller(tmp_path: Path) -> None:
    for width, head in ((92, "```python\n"), (93, "```{ .python .wide }\n")):
        (tmp_path / "x.py").write_text("#" * width, encoding="utf-8")
        (block,) = blocks.blocks('```python quote="x.py"\n```')
        assert expand(block, tmp_path, lambda quote: "").startswith(head)
