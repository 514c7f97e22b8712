"""The stored numbers of the sliders are current, and the page of the sliders is self-contained."""

from __future__ import annotations

import json
from importlib.resources import files

import pytest

from minisgl.chapters.site.sliders import VALUES, fragment, jobs, measure, page

STORED = json.loads((files("minisgl.chapters.site") / "sliders" / "sliders.json").read_text("utf-8"))


@pytest.mark.parametrize(("kind", "value"), [("chunk", 128), ("page", 256)])
def test_stored_numbers_are_current(kind: str, value: int) -> None:
    (stored,) = [run for run in STORED[kind] if run["value"] == value]
    assert measure(kind, value, jobs()) == stored, (
        "outdated: run `python -m minisgl.chapters.site.sliders` and commit the file that it writes"
    )


def test_numbers_support_the_chapters() -> None:
    assert {kind: tuple(run["value"] for run in runs) for kind, runs in STORED.items()} == VALUES
    gaps = {run["value"]: run["gap"] for run in STORED["chunk"]}
    # With a chunk of 32 tokens, up to 16 of these tokens are decode rows.
    assert all(gaps[value] <= value for value in VALUES["chunk"] if value >= 64)
    assert gaps[2048] > 1200  # a prompt of 1,200 tokens is computed in one step
    pages = {run["value"]: run for run in STORED["page"]}
    assert pages[2048]["running"] == 4 and pages[16]["running"] == 16
    assert pages[1]["wasted"] == 0 and pages[2048]["wasted"] > 8192 // 2
    assert pages[1]["prefilled"] < pages[16]["prefilled"] < pages[512]["prefilled"]  # larger pages share less
    assert pages[1]["writes"] > 10 * pages[16]["writes"]


def test_fragment_is_self_contained() -> None:
    for kind in VALUES:
        html = fragment(kind)
        assert f'data-kind="{kind}"' in html
        assert "src=" not in html and "http" not in html.replace("http://www.w3.org/2000/svg", "")
        assert "/* data */" not in html
    assert page().count("mg-slider") > 2
