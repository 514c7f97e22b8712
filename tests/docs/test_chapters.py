"""The form of the chapters: their length, their beginning, and their folded answers.

Words are those of the prose: code, its output, tables and comments do not count.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from minisgl.chapters.site import rendered
from minisgl.chapters.site.__main__ import course
from minisgl.chapters.site.blocks import prose

ROOT = Path(__file__).resolve().parents[2]
PAGES = [name for name, _ in course(ROOT) if not name.startswith("chapters/00")]
CHAPTERS = [name for name in PAGES if name != "chapters/03_scheduling_and_cache/index.md"]  # the list of three pages
MOST_WORDS = 3500
_ANSWER = re.compile(r"<summary>(?P<question>[^\n]*\?)</summary>\n\n(?P<answer>.*?)\n\n", re.DOTALL)


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def words(text: str) -> list[str]:
    """Return the words of a text, in lower case, without marks."""
    return re.findall(r"[a-z0-9']+", re.sub(r"<[^>]+>|\([^)]*\)", " ", text.lower()))


@pytest.mark.parametrize("name", PAGES)
def test_chapter_is_short(name: str) -> None:
    lines = [line for line in prose(text_of(name)).splitlines() if not line.lstrip().startswith("|")]
    assert len(" ".join(lines).split()) <= MOST_WORDS


@pytest.mark.parametrize("name", CHAPTERS)
def test_chapter_begins_with_its_question_and_a_picture(name: str) -> None:
    head = text_of(name).partition("\n## ")[0]
    paragraphs = [p for p in re.sub(r"<!--.*?-->\n*", "", head, flags=re.DOTALL).split("\n\n") if p.strip()]
    first = 2 if paragraphs[1].startswith("*This page takes") else 1
    assert paragraphs[first].startswith("**The question.** ") and paragraphs[first].rstrip().endswith("?")
    assert re.match(r"!\[.+\]\(pictures/[\w-]+\.svg\)", paragraphs[first + 1].strip())


def repeats(question: str, answer: str) -> bool:
    """Return whether the first sentence of an answer consists mostly of the words of its question."""
    asked, said = set(words(question)), words(re.split(r"(?<=[.:;]) ", " ".join(answer.split()))[0])[:9]
    return len(said) > 5 and sum(word in asked for word in said) >= 0.75 * len(said)


def test_repetition_is_recognized() -> None:
    question = "Why can't the cache keep a partly filled last page?"
    assert repeats(question, "The cache can't keep a partly filled last page, because its hash would change.")
    assert not repeats(question, "Its hash would change with the next token.")


@pytest.mark.parametrize("name", PAGES)
def test_answers_do_not_repeat_their_question(name: str) -> None:
    found = [m for m in _ANSWER.finditer(text_of(name)) if repeats(m["question"], m["answer"])]
    assert [m["question"] for m in found] == []


@pytest.mark.parametrize("name", PAGES)
def test_reader_sees_no_assert(name: str) -> None:
    """What the tests assert about an example is in a check, which the site does not show."""
    shown = [
        unit.block for unit in rendered.units(text_of(name)) if not unit.hidden and "quote" not in unit.block.options
    ]
    assert [f"line {block.line}" for block in shown if re.search(r"^\s*assert ", block.code, re.MULTILINE)] == []
