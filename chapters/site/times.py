"""How long a page of the course takes: a line below its title, and a column of the table in docs/course.md.

Reading times are calculated from the page, lab times are the estimates of the labs. ``make pages`` writes both.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

from minisgl.chapters.lab.catalog import find
from minisgl.chapters.site import rendered
from minisgl.chapters.site.blocks import prose

__all__ = ["course_table", "head", "labs_of", "reading_minutes"]

WORDS_PER_MINUTE = 100
"""Reading speed for text that has to be understood."""
SECONDS_PER_LINE = 3
"""Reading time of a line of code or output."""
_TITLE = re.compile(r"\A(?P<title># [^\n]+\n)\n(?:\*This page takes about [^\n]*\*\n\n)?")
_ROW = re.compile(
    r"^\| \[[^\]]+\]\((?P<page>\.\./chapters/[^)#]+)\) \|(?P<cells>(?: [^|\n]* \|){3})(?: [^|\n]* \|)?$", re.MULTILINE
)
_SUM = re.compile(r"about [\d.]+ hours of reading and [\d.]+ hours of labs")


def labs_of(markdown: str) -> list[str]:
    """Return the labs that a page describes, in order: those of its boxes."""
    return list(dict.fromkeys(re.findall(r'^print\(box\("(\w+)"\)\)$', markdown, re.MULTILINE)))


def reading_minutes(markdown: str) -> int:
    """Return how long a page takes to read, in minutes, a multiple of five."""
    words = len(prose(markdown).split())
    lines = 0
    for unit in rendered.units(markdown):
        lines += 0 if unit.hidden else unit.block.code.count("\n")
        lines += 0 if unit.output is None or unit.output.startswith("!") else unit.output.count("\n")
    return 5 * math.ceil((words / WORDS_PER_MINUTE + lines * SECONDS_PER_LINE / 60) / 5)


def head(markdown: str) -> str:
    """Return the page with the line of its times below the title."""
    match = _TITLE.match(markdown)
    if match is None:
        return markdown
    rest = markdown[match.end() :]
    labs = "".join(f" The lab `{name}` takes about {find(name).minutes} minutes." for name in labs_of(rest))
    words = f"*This page takes about {reading_minutes(rest)} minutes to read.{labs}*"
    return f"{match['title']}\n{words}\n\n{rest}"


def course_table(markdown: str, docs: Path) -> str:
    """Return docs/course.md with the times of each chapter in the last column, and with their sums.

    ``docs`` is the folder of the page.
    """
    reading = labs = 0

    def row(match: re.Match[str]) -> str:
        nonlocal reading, labs
        text = (docs / match["page"]).read_text(encoding="utf-8")
        minutes, extra = reading_minutes(_TITLE.sub("", text)), sum(find(name).minutes for name in labs_of(text))
        reading, labs = reading + minutes, labs + extra
        cell = f"{minutes} + {extra}" if extra else str(minutes)
        return f"{match[0][: match.end('cells') - match.start()]} {cell} |"

    table = _ROW.sub(row, markdown)
    return _SUM.sub(f"about {reading / 60:.0f} hours of reading and {labs / 60:.0f} hours of labs", table)
