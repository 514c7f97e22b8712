"""The picture of the ladder of stages: a line for each stage, a column of bars for each count.

A bar shows how its count compares with that of the stage before: better, worse or the same. Most ideas have a price, so
a worse count is drawn as a price and not as an error. The output is SVG, made from a list of `Stage`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from minisgl.trace.draw.svg import Picture

if TYPE_CHECKING:
    from minisgl.chapters.ladder.stages import Stage

__all__ = ["CHARTS", "compare", "draw"]

LEFT, COLUMN, BAR, ROW, THICK = 342, 124, 58, 36, 14
"""Width of the names, of a column, and of its longest bar; height of a line, and of a bar. In pixels."""
SAME = 0.02
"""Counts that differ by at most this share are the same: a step more or less is not the point of a stage."""

NOTES = {
    0: "each new token computes the whole text again",
    1: "one request at a time: no prompt interrupts its answer",
    2: "a step computes tokens of four requests",
    3: "a new prompt comes in at once, between two tokens",
    4: "16 requests fit where 4 did, with all their prompts",
    5: "a prefix that was computed before is not computed again",
    6: "answers go on while a prompt is computed in chunks",
    7: "the host plans a step while the device computes one",
    8: "a step checks guessed tokens; some guesses are wrong",
    9: "questions come first; long prompts may wait",
}
"""What happens in a stage, for the line below its name."""


class Chart(NamedTuple):
    """One count of each stage. ``rises`` says that a larger count is the better one."""

    title: str
    value: Callable[[Stage], float | None]
    show: Callable[[float], str] = "{:,.0f}".format
    rises: bool = False


CHARTS = (
    Chart("tokens computed", lambda s: s.computed),
    Chart("steps", lambda s: s.steps),
    Chart("most running", lambda s: s.most_running, rises=True),
    Chart("worst gap", lambda s: s.worst_gap),
    Chart("waits per step", lambda s: s.waits_per_step, "{:.2f}".format),
    Chart("launches", lambda s: s.launches),
)


def compare(chart: Chart, value: float, before: float | None) -> str:
    """Return ``gain``, ``price`` or ``even``: how a stage changed a count, compared with the stage before."""
    if before is None or abs(value - before) <= SAME * before:
        return "even"
    return "gain" if (value > before) == chart.rises else "price"


def draw(stages: Sequence[Stage], without_cache: int) -> str:
    """Return the ladder as SVG. ``without_cache`` is the number of tokens that a server without KV cache computes.

    The bar of this number would make all others too short to compare, so it is cut off, which a gap in the bar shows.
    """
    charts = [chart for chart in CHARTS if any(chart.value(stage) is not None for stage in stages)]
    pic = Picture("ladder", "The ladder of stages")
    pic.desc = _describe(charts, stages, without_cache)
    width = LEFT + len(charts) * COLUMN
    items = [("gain", "better than the stage before"), ("price", "worse: the price of the idea"), ("even", "as before")]
    y = pic.legend(0, 10, items) + 14
    for i, chart in enumerate(charts):
        pic.text(LEFT + i * COLUMN, y, chart.title, "strong")
    y += 12
    _name(pic, y, "–", "no KV cache", NOTES[0])
    _cut_bar(pic, LEFT, y + 3, f"{without_cache:,}", "without a KV cache (calculated, not measured)")
    for number, stage in enumerate(stages):
        y += ROW
        pic.path([(0, y - 5), (width, y - 5)], "line")
        _name(pic, y, str(stage.number), stage.name, NOTES.get(stage.number, ""))
        for i, chart in enumerate(charts):
            value = chart.value(stage)
            if value is not None:
                before = chart.value(stages[number - 1]) if number else without_cache if i == 0 else None
                most = max(v for v in map(chart.value, stages) if v is not None) or 1
                kind = compare(chart, value, before)
                _bar(pic, LEFT + i * COLUMN, y + 3, value / most, chart.show(value), kind, stage, chart)
    pic.text(0, y + ROW + 8, "worst gap: tokens that the server computed between two tokens of one answer. "
             "waits: the device waits for the host.", "small soft")  # fmt: skip
    return pic.render()


def _name(pic: Picture, y: float, number: str, name: str, note: str) -> None:
    pic.text(0, y + 14, number, "strong")
    pic.text(18, y + 14, name, "strong")
    if note:
        pic.text(18, y + 27, note, "small soft")


def _bar(
    pic: Picture, x: float, y: float, share: float, words: str, kind: str, stage: Stage, chart: Chart
) -> None:  # fmt: skip
    wide = max(1.5, BAR * share)
    said = {"gain": ", better than the stage before", "price": ", worse than the stage before", "even": ""}[kind]
    pic.rect(x, y, wide, THICK, kind, tip=f"stage {stage.number}, {stage.name}: {words}{said}", stage=stage.number,
             count=chart.title, kind=kind)  # fmt: skip
    pic.text(x + wide + 5, y + 11, words, "soft" if kind == "even" else "strong")


def _cut_bar(pic: Picture, x: float, y: float, words: str, tip: str) -> None:
    """Draw a bar that is longer than its column, with a gap before its end."""
    pic.rect(x, y, BAR - 16, THICK, "even", tip=tip)
    pic.rect(x + BAR - 11, y, 11, THICK, "even", tip=tip)
    for left in (BAR - 16, BAR - 11):
        pic.path([(x + left - 2, y + THICK + 3), (x + left + 2, y - 3)], "edge")
    pic.text(x + BAR + 5, y + 11, words, "strong")


def _describe(charts: Sequence[Chart], stages: Sequence[Stage], without_cache: int) -> str:
    """Return the text for screen readers: each count in all stages."""
    names = ", ".join(f"{stage.number} {stage.name}" for stage in stages)
    counts = []
    for chart in charts:
        values = [chart.value(stage) for stage in stages]
        numbers = ", ".join("not known" if v is None else chart.show(v) for v in values)
        counts.append(f"{chart.title[0].upper()}{chart.title[1:]}: {numbers}.")
    return (
        f"The counts of {len(stages)} stages: {names}. {' '.join(counts)} Without a KV cache {without_cache:,} tokens "
        "would be computed."
    )
