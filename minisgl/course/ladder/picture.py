"""The picture of the ladder of stages: one chart for each count, with one bar for each stage.

The bars of the stages that improve a count are coloured. The output is SVG, made from a list of `Stage`. The colours
follow the page that contains the picture, or the reader's system.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from minisgl.course.ladder.stages import Stage

WIDE, HIGH, BAR, GAP, TOP, LEFT = 336, 190, 34, 7, 40, 6


class Chart(NamedTuple):
    """One chart: a count of each stage. ``moved`` are the numbers of the stages that change the count most."""

    title: str
    moved: tuple[int, ...]
    value: Callable[[Stage], float | None]
    show: Callable[[float], str] = "{:,.0f}".format


CHARTS = (
    Chart("tokens computed", (1, 5), lambda s: s.computed),
    Chart("steps", (2, 3, 4, 8), lambda s: s.steps),
    Chart("requests in the largest step", (2, 4), lambda s: s.most_running),
    Chart("worst gap, tokens", (4, 6), lambda s: s.worst_gap),
    Chart("device waits per step", (7,), lambda s: s.waits_per_step, "{:.2f}".format),
    Chart("launches of a decode step", (7,), lambda s: s.launches),
)

STYLE = """\
.ladder { font: 12px system-ui, sans-serif; color: #222; }
.ladder text { fill: var(--md-default-fg-color, currentColor); }
.ladder .bar { fill: var(--md-default-fg-color--lighter, #b8b8b8); }
.ladder .moved { fill: var(--md-accent-fg-color, #4051b5); }
.ladder .title { font-weight: 600; }
.ladder .small { font-size: 11px; }
@media (prefers-color-scheme: dark) { .ladder { color: #ddd; } }
"""


def draw(stages: Sequence[Stage], without_cache: int, columns: int = 2) -> str:
    """Return all charts as one SVG.

    ``without_cache`` is the number of tokens that a server without KV cache would compute. It is given as text, because
    its bar would make all other bars too short.
    """
    charts = _available(stages)
    width, height = columns * WIDE, -(-len(charts) // columns) * HIGH + 24
    parts = [_open(width, height, _describe(stages, without_cache)), f"<style>{STYLE}</style>"]
    for i, chart in enumerate(charts):
        at = f'x="{i % columns * WIDE}" y="{i // columns * HIGH}" width="{WIDE}" height="{HIGH}"'
        parts.append(f"<svg {at}>{_bars(chart, stages)}</svg>")
    note = (
        f"Coloured: stages that change the count most. Without a KV cache, {without_cache:,} tokens would be computed."
    )
    parts += [f'<text class="small" x="{LEFT}" y="{height - 6}">{note}</text>', "</svg>"]
    return "\n".join(parts) + "\n"


def panels(stages: Sequence[Stage]) -> str:
    """Return the charts as HTML: side by side, or below each other on a narrow screen."""
    charts = "\n".join(
        f"{_open(WIDE, HIGH, _describe_one(chart, stages))}<style>{STYLE}</style>{_bars(chart, stages)}</svg>"
        for chart in _available(stages)
    )
    row = "display: flex; flex-wrap: wrap; gap: 0.5rem 1.5rem"
    return f'<div style="{row}">\n{charts}\n</div>\n'


def _available(stages: Sequence[Stage]) -> list[Chart]:
    """Return the charts whose count at least one stage has."""
    return [chart for chart in CHARTS if any(chart.value(stage) is not None for stage in stages)]


def _open(width: int, height: int, description: str) -> str:
    """Return the opening tag of a picture. ``description`` is the text for screen readers."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="ladder" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{description}" style="flex: 1 1 {WIDE}px; width: 100%; max-width: {width * 1.1:.0f}px">'
    )


def _bars(chart: Chart, stages: Sequence[Stage]) -> str:
    values = [chart.value(stage) for stage in stages]
    most = max([v for v in values if v is not None], default=0) or 1
    floor = HIGH - 34
    parts = [f'<text class="title" x="{LEFT}" y="14">{chart.title}</text>']
    for i, (stage, value) in enumerate(zip(stages, values, strict=True)):
        x = LEFT + i * (BAR + GAP)
        middle = x + BAR / 2
        parts.append(f'<text class="small" x="{middle}" y="{floor + 15}" text-anchor="middle">{stage.number}</text>')
        if value is None:
            continue
        tall = max(1.0, (floor - TOP) * value / most)
        written = chart.show(value)
        kind = "bar moved" if stage.number in chart.moved else "bar"
        parts.append(
            f'<rect class="{kind}" x="{x}" y="{floor - tall:.1f}" width="{BAR}" height="{tall:.1f}">'
            f"<title>stage {stage.number}, {stage.name}: {written}</title></rect>"
            f'<text class="small" x="{middle}" y="{floor - tall - 4:.1f}" text-anchor="middle">{written}</text>'
        )
    return "".join(parts)


def _describe_one(chart: Chart, stages: Sequence[Stage]) -> str:
    values = [chart.value(stage) for stage in stages]
    numbers = ", ".join("not known" if v is None else chart.show(v) for v in values)
    return f"{chart.title[0].upper()}{chart.title[1:]}, stages 1 to {len(values)}: {numbers}."


def _describe(stages: Sequence[Stage], without_cache: int) -> str:
    charts = " ".join(_describe_one(chart, stages) for chart in _available(stages))
    return f"{charts} Without a KV cache {without_cache:,} tokens would be computed."
