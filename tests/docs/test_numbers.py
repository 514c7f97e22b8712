"""Numbers in the text of the chapters that no block on the page prints. Checks on the pages cover all others."""

from __future__ import annotations

import re
from pathlib import Path

from minisgl.chapters.lab.box import answer_lines
from minisgl.chapters.lab.catalog import labs
from minisgl.chapters.site.diagrams import mask, ring
from minisgl.trace.events import VERSION

ROOT = Path(__file__).parents[2]


def test_masks_fit_on_a_phone() -> None:
    """The picture with the wrong and the correct mask is at most 360 pixels wide."""
    found = re.search(r' width="(\d+)"', mask())
    assert found is not None and int(found[1]) <= 360


def test_size_of_the_labs() -> None:
    sizes = [answer_lines(lab) for lab in labs() if lab.plugin]
    assert "about 10 to 90 lines of a plugin" in (ROOT / "docs/course.md").read_text()
    assert "plugin of about 10 to 90 lines" in (ROOT / "README.md").read_text()
    assert 8 <= min(sizes) <= 12
    assert 80 <= max(sizes) <= 90


def test_version_of_the_trace_format() -> None:
    text = " ".join((ROOT / "docs/trace.md").read_text().split())
    assert f"the format's version ({VERSION})" in text


def test_ring_has_the_numbers_of_its_lab() -> None:
    """In the picture of the ring, as in lab `ring`, part r is finished on rank r, after starting on rank r + 1."""
    cells = re.findall(r'data-round="(\d+)" data-rank="(\d+)" data-part="(\d+)" data-ranks="([^"]+)"', ring(3))
    summed = {(int(turn), int(rank), int(part)): words for turn, rank, part, words in cells}
    assert [rank for rank in range(3) if summed[2, rank, rank] == "0+1+2"] == [0, 1, 2]
    assert all(summed[1, (part + 2) % 3, part].count("+") == 1 for part in range(3)), "added on rank r + 2 first"
