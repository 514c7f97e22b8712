"""Charts of the benchmark pages, drawn from the tables of the page, so that a chart cannot disagree with its table."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from minisgl.bench.loadgen.plot import GAP, HEIGHT, LEFT, WIDTH, chart
from minisgl.trace.draw.svg import LINE, Picture

__all__ = ["Rows", "bars", "lines", "number", "table"]

ROOT = Path(__file__).parents[2]
LABEL, LONGEST, THICK = 190, 380, 13
"""Width of the labels and of the longest bar, and height of a bar, in pixels."""
HUES = (0, 1, 2, 6, 4)
"""Colours of the bars and lines, which are easy to tell apart."""

Rows = list[list[str]]
"""Cells of a table, without its head and without bold."""


def table(page: str, heading: str, index: int = 0) -> Rows:
    """Return the table number ``index`` below the line ``heading`` of a page of docs/."""
    text = "\n" + (ROOT / "docs" / page).read_text(encoding="utf-8")
    _, found, rest = text.partition(f"\n{heading}\n")
    tables = re.findall(r"(?:^\|.*\n)+", rest, re.MULTILINE)
    if not found or index >= len(tables):
        raise ValueError(f"{page} has no table {index} below a line {heading!r}")
    cells = [
        [cell.replace("*", "").replace("`", "").strip() for cell in line.strip()[1:-1].split("|")]
        for line in tables[index].splitlines()
    ]
    return cells[2:]


def number(cell: str) -> float | None:
    """Return the number of a cell: ``1,382`` is 1382.0, a range is its middle; None if there is none."""
    found = [float(each.replace(",", "")) for each in re.findall(r"-?\d[\d,]*(?:\.\d+)?", cell)]
    if not found:
        return None
    return sum(found[:2]) / 2 if " to " in cell and len(found) > 1 else found[0]


def bars(
    title: str, labels: Sequence[str], series: Sequence[tuple[str, Sequence[str]]], limit: float | None = None,
    reference: tuple[float, str] | None = None,
) -> str:  # fmt: skip
    """Return a bar chart: for each label, one bar of each series (name, cells). Cells without a number have no bar.

    A bar longer than ``limit`` is cut off. ``reference`` is a value at which a line is drawn, with its words.
    """
    pic = Picture("bars", title)
    y = 12.0
    pic.text(0, y, title, "strong")
    names = [name for name, _ in series]
    if any(names):
        y = pic.legend(0, y + 6 + LINE, [(f"q{hue}", name) for hue, name in zip(HUES, names, strict=False)], 640) - 8
    values = [number(cell) or 0.0 for _, cells in series for cell in cells]
    most = min(max(values), limit or max(values))
    y += LINE
    top = y
    sentences = []
    for i, label in enumerate(labels):
        shown = [(hue, name, cells[i]) for hue, (name, cells) in zip(HUES, series, strict=False) if number(cells[i])]
        pic.text(LABEL - 8, y + len(shown) * THICK / 2 + 3, label, "end")
        for hue, name, cell in shown:
            value = number(cell) or 0.0
            wide = max(1.5, LONGEST * min(value, most) / most)
            pic.rect(LABEL, y, wide, THICK - 3, f"q{hue}", r=1.5, tip=f"{label} {name}: {cell}", value=value)
            if value > most:
                pic.path([(LABEL + wide - 14, y + THICK - 1), (LABEL + wide - 8, y - 2)], "cut")
            pic.text(LABEL + wide + 5, y + THICK - 4, cell, "small")
            y += THICK
        y += 6
        sentences.append(f"{label}: {', '.join(f'{name} {cell}'.strip() for _, name, cell in shown)}.")
    if reference is not None:
        x = LABEL + LONGEST * reference[0] / most
        pic.path([(x, top - 4), (x, y)], "badline")
        pic.text(x, y + 12, reference[1], "small soft mid")
    pic.desc = f"{title}. {' '.join(sentences)}"
    return pic.render()


def lines(title: str, charts: Sequence[tuple[str, str, Sequence[str], Sequence[tuple[str, Sequence[str]]]]]) -> str:
    """Return line charts side by side, two in a row, with one legend.

    A chart is (title, name of the horizontal axis, words of this axis, series). All charts have the same series names.
    """
    pic = Picture("lines", title)
    pic.text(0, 12, title, "strong")
    names = [name for name, _ in charts[0][3]]
    pic.legend(LEFT, 14 + LINE, [(f"s{hue}", name) for hue, name in zip(HUES, names, strict=False)], 2 * WIDTH)
    sentences = []
    for at, (heading, axis, words, series) in enumerate(charts):
        drawn = []
        for name, cells in series:
            points = [(float(i), value) for i, cell in enumerate(cells) if (value := number(cell)) is not None]
            drawn.append((name, points))
            sentences.append(f"{heading}, {name}: {', '.join(cells)}.")
        place = at % 2 * (LEFT + WIDTH + GAP), 3 * LINE + at // 2 * (HEIGHT + 5 * LINE)
        chart(pic, *place, heading, axis, drawn, words, HUES[: len(drawn)])
    pic.desc = f"{title}. By {charts[0][1]}, {', '.join(charts[0][2])}. {' '.join(sentences)}"
    return pic.render()
