"""The plot of a measurement as SVG: latencies and throughput of one run, or of a sweep by its load."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from minisgl.bench.loadgen.completion import RequestRecord
from minisgl.bench.loadgen.measure import Results
from minisgl.bench.loadgen.metrics import itls, tokens_by_second, tpot
from minisgl.bench.loadgen.report import NAMES, load_text
from minisgl.trace.draw.svg import LINE, Picture

Points = list[tuple[float, float]]
Series = list[tuple[str, Points]]
"""Lines of a chart: name and points."""

WIDTH, HEIGHT = 272, 150
"""Size of a chart's plotting area, in pixels."""
LEFT, GAP = 52, 40
MAX_POINTS = 200
"""Number of points of a distribution that are drawn."""
STATISTICS = ("p50", "p90", "p99")


def draw(results: Results) -> str:
    """Return the SVG of the results."""
    pic = Picture("load", results.title)
    if results.sweep:
        charts, words = _sweep_charts(results.reports), "Throughput and latency by load."
    else:
        pic.title = f"{results.title}: {load_text(results.reports[0])}"
        charts, words = _run_charts(results.reports[0], results.records[0]), "Throughput, and shares of latencies."
    pic.text(0, 12, pic.title, "strong")
    for number, (title, x_name, series) in enumerate(charts):
        column, row = number % 2, number // 2
        chart(pic, column * (LEFT + WIDTH + GAP), 2 * LINE + row * (HEIGHT + 5 * LINE), title, x_name, series)
    pic.desc = words
    return pic.render()


def _run_charts(report: dict[str, Any], records: Sequence[RequestRecord]) -> list[tuple[str, str, Series]]:
    done = [record for record in records if record.completed]
    seconds = [(second + 0.5, tokens) for second, tokens in enumerate(tokens_by_second(done))]
    values = {
        "ttft": [record.ttft for record in done],
        "tpot": [tpot(record) for record in done if record.output_len > 1],
        "itl": [itl for record in done for itl in itls(record)],
        "e2el": [record.latency for record in done],
    }
    charts: list[tuple[str, str, Series]] = [
        ("Output tokens per second", "seconds since the first request", [("", seconds)]),
        ("Requests in flight", "seconds since the first request", [("", _in_flight(records))]),
    ]
    for metric, words in NAMES.items():
        charts.append((f"{words}: % of the values below", "milliseconds", [("", distribution(values[metric]))]))
    return charts


def _sweep_charts(reports: Sequence[dict[str, Any]]) -> list[tuple[str, str, Series]]:
    x_name, loads = _loads(reports)
    requests = [("completed", _by_load(reports, loads, "request_throughput"))]
    if reports[0]["request_goodput"] is not None:
        requests.append(("good", _by_load(reports, loads, "request_goodput")))
    charts: list[tuple[str, str, Series]] = [
        ("Output tokens per second", x_name, [("", _by_load(reports, loads, "output_throughput"))]),
        ("Requests per second", x_name, requests),
    ]
    for metric, words in NAMES.items():
        lines = [(name, _by_load(reports, loads, f"{name}_{metric}_ms")) for name in STATISTICS]
        charts.append((f"{words}, ms", x_name, lines))
    return charts


def _loads(reports: Sequence[dict[str, Any]]) -> tuple[str, list[float]]:
    """Return the name and the values of a sweep's horizontal axis. An infinite rate is drawn as the measured one."""
    if reports[0]["max_concurrency"] is not None:
        return "clients", [report["max_concurrency"] for report in reports]
    if "replay_speed" in reports[0]:
        return "speed of the trace", [report["replay_speed"] for report in reports]
    rates = [report["request_rate"] for report in reports]
    return "requests per second sent", [
        report["request_throughput"] if rate == "inf" else rate for rate, report in zip(rates, reports, strict=True)
    ]


def _by_load(reports: Sequence[dict[str, Any]], loads: Sequence[float], name: str) -> Points:
    return sorted((load, report[name]) for load, report in zip(loads, reports, strict=True))


def distribution(seconds: Sequence[float]) -> Points:
    """Return the points (milliseconds, % of the values that are not larger), at most `MAX_POINTS`."""
    if not seconds:
        return []
    shares = np.linspace(0, 100, min(len(seconds), MAX_POINTS) + 1)
    return list(zip((np.percentile(seconds, shares) * 1e3).tolist(), shares.tolist(), strict=True))


def _in_flight(records: Sequence[RequestRecord]) -> Points:
    """Return the number of requests in flight, by seconds since the first request."""
    if not records:
        return []
    begin = min(record.start for record in records)
    changes = sorted(change for r in records for change in ((r.start - begin, 1), (r.end - begin, -1)))
    times = np.array([time for time, _ in changes])
    numbers = np.cumsum([change for _, change in changes])
    at = np.linspace(0, times[-1], MAX_POINTS)
    return [(float(t), float(numbers[max(0, np.searchsorted(times, t, "right") - 1)])) for t in at]


def chart(
    pic: Picture,
    x: float,
    y: float,
    title: str,
    x_name: str,
    series: Series,
    x_words: Sequence[str] = (),
    hues: Sequence[int] = (),
) -> None:
    """Draw one chart whose upper left corner is (x, y).

    With ``x_words``, the horizontal values are indices of these words, which are written below the chart. ``hues`` are
    the colours of the lines, for which the picture has a legend of its own.
    """
    left, bottom = x + LEFT, y + 2 * LINE + HEIGHT
    points = [point for _, line in series for point in line]
    x_ticks = ticks(max((px for px, _ in points), default=1.0))
    if x_words:
        x_ticks = [0.0, max(len(x_words) - 1.0, 1.0)]
    y_ticks = ticks(max((py for _, py in points), default=1.0))
    pic.text(left, y + 10, title, "strong")
    for tick in y_ticks:
        at = bottom - HEIGHT * tick / y_ticks[-1]
        pic.path([(left, at), (left + WIDTH, at)], "line")
        pic.text(left - 6, at + 4, f"{tick:,g}", "small soft end")
    for tick, word in enumerate(x_words) if x_words else ((tick, f"{tick:,g}") for tick in x_ticks):
        pic.text(left + WIDTH * tick / x_ticks[-1], bottom + 13, word, "small soft mid")
    pic.text(left + WIDTH / 2, bottom + 26, x_name, "small soft mid")
    for number, (name, line) in zip(hues or range(len(series)), series, strict=True):
        scaled = [(left + WIDTH * px / x_ticks[-1], bottom - HEIGHT * py / y_ticks[-1]) for px, py in line]
        if scaled:
            pic.path(scaled, f"s{number}", tip=name)
        if len(scaled) < MAX_POINTS // 4:
            for (px, py), at_point in zip(line, scaled, strict=True):
                pic.dot(*at_point, 2.5, f"q{number}", tip=f"{name} {px:,.4g}: {py:,.4g}".strip())
    if not hues and any(name for name, _ in series):
        pic.legend(left, y + 10 + LINE, [(f"s{number}", name) for number, (name, _) in enumerate(series)])


def ticks(largest: float, count: int = 5) -> list[float]:
    """Return about ``count`` round numbers from 0, the last at least ``largest``."""
    if not 0 < largest < math.inf:
        return [0.0, 1.0]
    rough = largest / count
    power = 10 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    return [float(f"{number * step:.6g}") for number in range(math.ceil(largest / step * 0.999) + 1)]
