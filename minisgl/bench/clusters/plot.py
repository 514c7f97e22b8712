"""The plot of `bench cluster` as SVG: hit rate, load and TTFT by the number of replicas, a line for each policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from minisgl.bench.clusters.results import Row
from minisgl.bench.loadgen.plot import GAP, HEIGHT, LEFT, WIDTH, chart
from minisgl.trace.draw.svg import LINE, Picture

CHARTS: tuple[tuple[str, Callable[[Row], float]], ...] = (
    ("Hit rate, % of the prompt tokens", lambda row: 100 * row.hit_rate),
    ("Max/mean load, requests", lambda row: row.max_mean_requests),
    ("TTFT p50, s", lambda row: row.ttft_p50_ms / 1e3),
    ("TTFT p99, s", lambda row: row.ttft_p99_ms / 1e3),
)


def draw(rows: Sequence[Row], title: str) -> str:
    """Return the SVG of the rows."""
    pic = Picture("load", title)
    pic.text(0, 12, title, "strong")
    names = list(dict.fromkeys(row.routing for row in rows))
    for number, (name, value) in enumerate(CHARTS):
        series = [(r, sorted((float(row.replicas), value(row)) for row in rows if row.routing == r)) for r in names]
        column, line = number % 2, number // 2
        place = column * (LEFT + WIDTH + GAP), 2 * LINE + line * (HEIGHT + 6 * LINE)
        chart(pic, *place, name, "replicas", series)
    pic.desc = "Hit rate, load balance and time to first token by routing policy and number of replicas."
    return pic.render()
