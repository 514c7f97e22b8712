"""``python -m minisgl.chapters.site``: prints course pages that use a term before its definition (status 1)."""

from __future__ import annotations

import sys
from pathlib import Path

from minisgl.chapters.site.terms import check, check_glossary, glossary

ROOT = Path(__file__).parents[2]


def course(root: Path) -> list[tuple[str, str]]:
    """Return the pages of the course in reading order, as (path relative to ``root``, Markdown)."""
    pages = sorted((root / "chapters").glob("*/*.md"), key=lambda p: (p.parent.name, p.name != "index.md", p.name))
    return [(page.relative_to(root).as_posix(), page.read_text(encoding="utf-8")) for page in pages]


def main() -> int:
    """Print the problems, and return the exit status."""
    terms = glossary((ROOT / "docs" / "glossary.md").read_text(encoding="utf-8"))
    problems = check_glossary(terms) + check(course(ROOT), terms)
    print("\n".join(problems) or "Every term is defined before it is used.")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
