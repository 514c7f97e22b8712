"""Links of the pages work in the repository, as GitHub shows it, and in the site."""

from __future__ import annotations

from pathlib import Path

import pytest

from minisgl.chapters.site.links import dead, for_site

ROOT = Path(__file__).parents[3]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("chapters/**/*.md")]


def test_links_lead_to_files_of_the_repository() -> None:
    assert len(PAGES) > 50
    assert {str(page.relative_to(ROOT)): links for page in PAGES if (links := dead(page))} == {}


def test_dead_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("[here](page.md#part), [gone](gone.md), `[code](no.md)`, <https://a.b>, [out](https://a.b/c.md)\n")
    assert dead(page) == ["gone.md"]


@pytest.mark.parametrize(
    ("page", "link", "shown"),
    [
        ("chapters/04_attention/index.md", "../../docs/glossary.md#page", "../../glossary.md#page"),
        ("chapters/04_attention/index.md", "../05_engine/index.md", "../05_engine/index.md"),
        ("chapters/04_attention/index.md", "pictures/tree.svg", "pictures/tree.svg"),
        ("course.md", "../chapters/04_attention/index.md", "chapters/04_attention/index.md"),
        ("benchmarks/stages.md", "../../chapters/00_start/index.md", "../chapters/00_start/index.md"),
        ("index.md", "course.md", "course.md"),
        ("index.md", "https://a.b/docs/c.md", "https://a.b/docs/c.md"),
    ],
)
def test_links_of_the_site(page: str, link: str, shown: str) -> None:
    """Inline code and blocks are not rewritten."""
    text = "A [word]({0}), `[code](../../docs/a.md)`.\n\n```text\n[block](../../docs/a.md)\n```\n"
    assert for_site(text.format(link), page) == text.format(shown)
