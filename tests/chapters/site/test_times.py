"""The times of pages: reading times are calculated, lab times are those of the labs."""

from __future__ import annotations

from pathlib import Path

from minisgl.chapters.lab.catalog import labs
from minisgl.chapters.site.__main__ import course
from minisgl.chapters.site.times import course_table, head, labs_of, reading_minutes

ROOT = Path(__file__).resolve().parents[3]
PAGE = '# Title\n\nSome text.\n\n```python exec="on"\nprint(box("policy"))\n```\n'


def test_head_has_reading_and_lab_times() -> None:
    page = head(PAGE)
    line = "*This page takes about 5 minutes to read. The lab `policy` takes about 45 minutes.*"
    assert page.startswith(f"# Title\n\n{line}\n\nSome text.")
    assert head(page) == page
    assert "lab" not in head("# Title\n\nSome text.\n").splitlines()[2]


def test_longer_page_takes_longer() -> None:
    assert reading_minutes("word " * 990) == 10
    assert reading_minutes("word " * 990 + "\n\n```python\n" + "x = 1\n" * 100 + "```\n") == 15


def test_every_lab_is_counted_once() -> None:
    found = [name for _, text in course(ROOT) for name in labs_of(text)]
    assert sorted(found) == sorted(lab.lab for lab in labs())


def test_table_of_the_course_has_the_times() -> None:
    docs = ROOT / "docs"
    text = (docs / "course.md").read_text(encoding="utf-8")
    assert course_table(text, docs) == text, "run make pages"
    row = "| [1 · Foundations](../chapters/01_foundations/index.md) | a | b | c |"
    assert course_table(row, docs).count("|") == 6
