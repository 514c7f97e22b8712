"""The sliders' numbers are what the scheduler does today, and the page they make needs nothing else."""

from __future__ import annotations

import json
from importlib.resources import files

import pytest

from minisgl.course.site.sliders import VALUES, fragment, jobs, measure, page

KEPT = json.loads((files("minisgl.course.site") / "sliders" / "sliders.json").read_text("utf-8"))


@pytest.mark.parametrize(("kind", "value"), [("chunk", 128), ("page", 256)])
def test_the_numbers_are_fresh(kind: str, value: int) -> None:
    (kept,) = [run for run in KEPT[kind] if run["value"] == value]
    assert measure(kind, value, jobs()) == kept, (
        "stale: run `python -m minisgl.course.site.sliders`, and commit what it wrote"
    )


def test_they_say_what_the_chapters_say() -> None:
    assert {kind: tuple(run["value"] for run in runs) for kind, runs in KEPT.items()} == VALUES
    gaps = {run["value"]: run["gap"] for run in KEPT["chunk"]}
    assert all(gaps[value] <= value for value in VALUES["chunk"] if value >= 64)  # of 32, half can be decode rows
    assert gaps[2048] > 1200  # a prompt in one piece
    pages = {run["value"]: run for run in KEPT["page"]}
    assert pages[2048]["running"] == 4 and pages[16]["running"] == 16
    assert pages[1]["wasted"] == 0 and pages[2048]["wasted"] > 8192 // 2
    assert pages[1]["prefilled"] < pages[16]["prefilled"] < pages[512]["prefilled"]  # coarse pages share less
    assert pages[1]["writes"] > 10 * pages[16]["writes"]


def test_a_fragment_stands_alone() -> None:
    for kind in VALUES:
        html = fragment(kind)
        assert f'data-kind="{kind}"' in html
        assert "src=" not in html and "http" not in html.replace("http://www.w3.org/2000/svg", "")
        assert "/* data */" not in html
    assert page().count("mg-slider") > 2
