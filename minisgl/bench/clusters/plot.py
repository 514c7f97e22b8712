"""The plot of `bench cluster` as SVG: hit rate, load and TTFT by the number of replicas, a line for each policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from minisgl.bench.clusters.results import ONE_CACHE, Row
from minisgl.bench.loadgen.plot import GAP, HEIGHT, LEFT, WIDTH, chart
from minisgl.trace.draw.svg import HUES, LINE, Picture

HIT_RATE = "Hit rate, % of the prompt tokens"
CHARTS: dict[str, Callable[[Row], float]] = {
    HIT_RATE: lambda row: 100 * row.hit_rate,
    "Max/mean load, requests": lambda row: row.max_mean_requests,
    "TTFT p50, s": lambda row: row.ttft_p50_ms / 1e3,
    "TTFT p99, s": lambda row: row.ttft_p99_ms / 1e3,
}
FIRST_HUES = (5, 1, 2, 6)
"""Colours of the first lines, which are easy to tell apart."""


def draw(rows: Sequence[Row], heading: str) -> str:
    """Return the SVG of the rows. `ONE_CACHE` has a hit rate only: its server is faster than a replica."""
    pic = Picture("load", heading)
    pic.text(0, 12, heading, "strong")
    names = list(dict.fromkeys(row.routing for row in rows))
    hues = [FIRST_HUES[i] if i < len(FIRST_HUES) else i % HUES for i in range(len(names))]
    pic.legend(LEFT, 12 + LINE, [(f"s{hue}", name) for hue, name in zip(hues, names, strict=True)])
    counts = sorted({row.replicas for row in rows})
    for number, (title, value) in enumerate(CHARTS.items()):
        chosen = [(h, n) for h, n in zip(hues, names, strict=True) if n != ONE_CACHE or title == HIT_RATE]
        series = [
            (name, sorted((float(counts.index(row.replicas)), value(row)) for row in rows if row.routing == name))
            for _, name in chosen
        ]
        column, line = number % 2, number // 2
        place = column * (LEFT + WIDTH + GAP), 3 * LINE + line * (HEIGHT + 5 * LINE)
        chart(pic, *place, title, "replicas", series, [str(count) for count in counts], [hue for hue, _ in chosen])
    pic.desc = "Hit rate, load balance and time to first token by routing policy and number of replicas."
    return pic.render()
