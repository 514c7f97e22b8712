"""Links between pages: in the Markdown they are relative to the repository, as on GitHub, and the build adapts them.

In the site, the folder ``chapters`` is inside ``docs``.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from minisgl.chapters.site.blocks import map_text, without_blocks

__all__ = ["dead", "for_site"]

LINK = re.compile(r"(?P<ticks>`+).+?(?P=ticks)|\]\((?P<path>[^)#:\s]+)(?P<anchor>#[^)\s]*)?\)", re.DOTALL)
"""Inline code, which is skipped, or a link with a relative path, and perhaps an anchor."""


def for_site(markdown: str, page: str) -> str:
    """Return the page with its links relative to the site. ``page`` is its path in the site."""
    source = page if page.startswith("chapters/") else f"docs/{page}"

    def rewrite(match: re.Match[str]) -> str:
        if match["path"] is None:
            return match[0]
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), match["path"]))
        place = target.removeprefix("docs/")
        if not target.startswith(("docs/", "chapters/")):
            return match[0]
        return f"]({posixpath.relpath(place, posixpath.dirname(page) or '.')}{match['anchor'] or ''})"

    return map_text(markdown, lambda text: LINK.sub(rewrite, text))


def dead(page: Path) -> list[str]:
    """Return the relative links of a Markdown file that lead to no file."""
    links = LINK.finditer(without_blocks(page.read_text(encoding="utf-8")))
    return [link["path"] for link in links if link["path"] and not (page.parent / link["path"]).exists()]
