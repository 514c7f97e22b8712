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


def draw(rows: Sequence[Row], heading: str) -> str:
    """Return the SVG of the rows."""
    pic = Picture("load", heading)
    pic.text(0, 12, heading, "strong")
    names = list(dict.fromkeys(row.routing for row in rows))
    counts = sorted({row.replicas for row in rows})
    for number, (title, value) in enumerate(CHARTS):
        series = [
            (name, sorted((float(counts.index(row.replicas)), value(row)) for row in rows if row.routing == name))
            for name in names
        ]
        column, line = number % 2, number // 2
        place = column * (LEFT + WIDTH + GAP), 2 * LINE + line * (HEIGHT + 6 * LINE)
        chart(pic, *place, title, "replicas", series, [str(count) for count in counts])
    pic.desc = "Hit rate, load balance and time to first token by routing policy and number of replicas."
    return pic.render()
