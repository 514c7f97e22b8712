"""Charts of the benchmark pages, drawn from the tables of the page, so that a chart cannot disagree with its table."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

from minisgl.bench.loadgen.plot import GAP, HEIGHT, LEFT, WIDTH, chart
from minisgl.trace.draw.svg import LINE, NARROW, Picture, figure

__all__ = ["Rows", "bars", "lines", "number", "shown", "table"]

ROOT = Path(__file__).parents[2]
LABEL, LONGEST, THICK = 240, 330, 13
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
    reference: tuple[float, str] | None = None, narrow: bool = False,
) -> str:  # fmt: skip
    """Return a bar chart: for each label, one bar of each series (name, cells). Cells without a number have no bar.

    A bar longer than ``limit`` is cut off. ``reference`` is a value at which a line is drawn, with its words. In a
    ``narrow`` chart, for a phone, a label is above its bars.
    """
    pic = Picture("bars", title)
    y = _title(pic, title, narrow)
    left, longest = (0.0, NARROW - 90) if narrow else (LABEL, LONGEST)
    names = [name for name, _ in series]
    if any(names):
        items = [(f"q{hue}", name) for hue, name in zip(HUES, names, strict=False)]
        y = pic.legend(0, y + 6 + LINE, items, NARROW if narrow else 640) - 8
    values = [number(cell) or 0.0 for _, cells in series for cell in cells]
    most = min(max(values), limit or max(values))
    y += LINE
    top = y
    sentences = []
    for i, label in enumerate(labels):
        shown = [(hue, name, cells[i]) for hue, (name, cells) in zip(HUES, series, strict=False) if number(cells[i])]
        if narrow:
            pic.text(0, y + 10, label)
            y += LINE
        else:
            pic.text(LABEL - 8, y + len(shown) * THICK / 2 + 3, label, "end")
        for hue, name, cell in shown:
            value = number(cell) or 0.0
            wide = max(1.5, longest * min(value, most) / most)
            pic.rect(left, y, wide, THICK - 3, f"q{hue}", r=1.5, tip=f"{label} {name}: {cell}", value=value)
            if value > most:
                pic.path([(left + wide - 14, y + THICK - 1), (left + wide - 8, y - 2)], "cut")
            pic.text(left + wide + 5, y + THICK - 4, cell, "small")
            y += THICK
        y += 6
        sentences.append(f"{label}: {', '.join(f'{name} {cell}'.strip() for _, name, cell in shown)}.")
    if reference is not None:
        x = left + longest * reference[0] / most
        pic.path([(x, top - 4), (x, y)], "badline")
        pic.text(x, y + 12, reference[1], "small soft mid")
    pic.desc = f"{title}. {' '.join(sentences)}"
    return pic.render()


def _title(pic: Picture, title: str, narrow: bool) -> float:
    """Write the title of a chart, in several lines if it is narrow. Return the baseline of the last line."""
    words = textwrap.wrap(title, 43) if narrow else [title]
    pic.width = NARROW if narrow else pic.width
    for i, line in enumerate(words):
        pic.text(0, 12 + LINE * i, line, "strong")
    return 12.0 + LINE * (len(words) - 1)


def shown(draw: Callable[..., str], *args: object, **options: object) -> str:
    """Return the figure of a chart, `bars` or `lines`, with its version for a narrow screen."""
    return figure(draw(*args, **options), narrow=draw(*args, **options, narrow=True))


def lines(
    title: str, charts: Sequence[tuple[str, str, Sequence[str], Sequence[tuple[str, Sequence[str]]]]],
    narrow: bool = False,
) -> str:  # fmt: skip
    """Return line charts side by side, two in a row (one if ``narrow``), with one legend.

    A chart is (title, name of the horizontal axis, words of this axis, series). All charts have the same series names.
    """
    pic = Picture("lines", title)
    top, columns = _title(pic, title, narrow) - 12, 1 if narrow else 2
    names = [name for name, _ in charts[0][3]]
    items = [(f"s{hue}", name) for hue, name in zip(HUES, names, strict=False)]
    top = pic.legend(0 if narrow else LEFT, top + 14 + LINE, items, columns * WIDTH) - 14 - 2 * LINE
    sentences = []
    for at, (heading, axis, words, series) in enumerate(charts):
        drawn = []
        for name, cells in series:
            points = [(float(i), value) for i, cell in enumerate(cells) if (value := number(cell)) is not None]
            drawn.append((name, points))
            sentences.append(f"{heading}, {name}: {', '.join(cells)}.")
        place = at % columns * (LEFT + WIDTH + GAP), top + 3 * LINE + at // columns * (HEIGHT + 5 * LINE)
        chart(pic, *place, heading, axis, drawn, words, HUES[: len(drawn)])
    pic.desc = f"{title}. By {charts[0][1]}, {', '.join(charts[0][2])}. {' '.join(sentences)}"
    return pic.render()
