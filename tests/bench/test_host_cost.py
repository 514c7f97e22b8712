"""What a step costs on the host: bounds that a busy machine keeps too. The figures are in docs/benchmarks."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest

from minisgl.bench import host as bench
from minisgl.config import Config
from minisgl.options.compose import compose
from minisgl.plugin_manager.manager import PluginManager
from minisgl.scheduler.scheduler import Scheduler


@pytest.fixture(scope="module")
def plugins() -> PluginManager:
    return PluginManager.load(light=True)


def medians(runs: list[Scheduler], blocks: int = 12) -> list[float]:
    """Seconds a step of each, measured in turns."""
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(blocks):
        for run, mine in zip(runs, times, strict=True):
            mine += bench.timed(run, bench.BLOCK)
    return [statistics.median(mine) for mine in times]


def config(plugins: PluginManager, policy: str) -> Config:
    return compose(plugins, [f"scheduler={policy}"])


@pytest.mark.parametrize("policy", ["prefill_first", "mixed"])
def test_a_step_costs_the_same_at_32k_tokens_as_at_1k(plugins: PluginManager, policy: str) -> None:
    steps = 12 * bench.BLOCK
    runs = [bench.decoding(config(plugins, policy), plugins, context, 64, steps) for context in bench.CONTEXTS]
    short, long = medians(runs)
    assert long < 1.25 * short, f"{short * 1e6:.0f} µs at 1k, {long * 1e6:.0f} µs at 32k"


@pytest.mark.parametrize("policy", ["prefill_first", "mixed"])
def test_a_row_costs_little(plugins: PluginManager, policy: str) -> None:
    steps = 12 * bench.BLOCK
    few, many = medians([bench.decoding(config(plugins, policy), plugins, 1024, rows, steps) for rows in (16, 256)])
    a_row = (many - few) / 240
    assert a_row < 6e-6, f"{a_row * 1e6:.1f} µs a row"  # the bar is 2, on a machine of its own
    assert few < 800e-6, f"{few * 1e6:.0f} µs with 16 rows"


def test_the_command_prints_a_table_and_writes_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench.main(["scheduler=mixed", "--steps", "25", "--json", str(tmp_path / "host.json")])
    shown = capsys.readouterr().out
    assert "µs a row" in shown
    assert "prefill, chunk 512" in shown
    report = json.loads((tmp_path / "host.json").read_text())
    assert report["options"] == ["scheduler=mixed"]
    decode = {(p["context"], p["rows"]) for p in report["points"] if p["what"] == "decode"}
    assert decode == {(context, rows) for context in bench.CONTEXTS for rows in bench.ROWS}
    assert all(0 < p["median"] <= p["p99"] and p["steps"] > 0 for p in report["points"])


def test_a_line_through_exact_points_is_that_line() -> None:
    points = [bench.Point("decode", 1024, rows, 1, 100 + 1.5 * rows, 0, 0) for rows in bench.ROWS]
    assert bench.fit(points, 1024) == bench.Fit(1024, 100.0, 1.5)
