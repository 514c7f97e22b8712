"""The look of the pages, tested without a browser: contrast, descriptions of pictures, the width of code, charts."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path

import pytest

from minisgl.chapters.site import moving, rendered
from minisgl.chapters.site.__main__ import course
from minisgl.chapters.site.blocks import without_blocks
from minisgl.chapters.site.charts import bars, number, table
from minisgl.chapters.site.home import walk
from minisgl.trace.draw import svg
from minisgl.trace.tour import FINDERS, tour

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*(ROOT / name for name, _ in course(ROOT)), *sorted((ROOT / "docs").glob("**/*.md")), ROOT / "README.md"]
PICTURES = {"default": svg._LIGHT, "slate": svg._DARK}
MIN_CONTRAST = 4.5
"""WCAG 2, level AA, for text of any size."""
COLUMNS = 88
LATER = ("index.md", "cpu-offline.md", "h200.md")
"""Pages of docs/benchmarks/ that have no chart at their head."""


def palette(scheme: str) -> dict[str, str]:
    """Return the custom properties of a colour scheme in site.css."""
    css = (ROOT / "docs/assets/site.css").read_text(encoding="utf-8")
    block = re.search(rf'^\[data-md-color-scheme="{scheme}"\] {{(.*?)^}}', css, re.MULTILINE | re.DOTALL)
    assert block
    return dict(re.findall(r"--md-([\w-]+): (#\w{6});", block[1]))


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def too_close(pairs: dict[str, tuple[str, str]]) -> dict[str, float]:
    return {name: round(value, 2) for name, pair in pairs.items() if (value := contrast(*pair)) < MIN_CONTRAST}


def test_contrast_is_computed_as_in_wcag() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.005)


@pytest.mark.parametrize("scheme", PICTURES)
def test_text_of_the_site_has_contrast(scheme: str) -> None:
    c = palette(scheme)
    paper, code = c["default-bg-color"], c["code-bg-color"]
    pairs = {
        f"{name} on {where}": (c[name], back)
        for name in (
            "default-fg-color",
            "default-fg-color--light",
            "typeset-color",
            "typeset-a-color",
            "accent-fg-color",
        )
        for where, back in (("paper", paper), ("code", code))
    }
    pairs |= {name: (value, code) for name, value in c.items() if name.startswith("code-hl") or name == "code-fg-color"}
    pairs |= {f"code on {name}": (c["code-fg-color"], c[name]) for name in ("typeset-ins-color", "typeset-del-color")}
    pairs |= {
        f"{name} on {back}": (c[name], c[back])
        for name, back in product(("primary-bg-color", "primary-bg-color--light"), ("primary-fg-color",))
    }
    pairs |= {
        f"{name} on {back}": (c[name], c[back])
        for name in ("footer-fg-color", "footer-fg-color--light", "footer-fg-color--lighter")
        for back in ("footer-bg-color", "footer-bg-color--dark")
    }
    assert len(pairs) > 25 and too_close(pairs) == {}


@pytest.mark.parametrize("scheme", PICTURES)
def test_text_of_pictures_has_contrast(scheme: str) -> None:
    c = PICTURES[scheme]
    filled = ("prefill", "decode", "cache", "bad", "retire", *(f"q{i}" for i in range(svg.HUES)))
    pairs = {f"on {name}": (c["on"], c[name]) for name in filled}
    pairs |= {f"{name} on {back}": (c[name], c[back]) for name in ("ink", "soft") for back in ("paper", "well")}
    pairs |= {f"{name} as text": (c[name], c["paper"]) for name in ("bad", "cache", "decode")}
    pairs |= {"value in a heat map": (c["ink"], c["heat"])}
    assert too_close(pairs) == {}


@pytest.mark.parametrize("scheme", PICTURES)
def test_pictures_have_the_paper_of_the_page(scheme: str) -> None:
    assert PICTURES[scheme]["paper"] == palette(scheme)["default-bg-color"]


def test_same_kind_of_mark_has_one_colour() -> None:
    """A mark without opacity looks like its sample in the legend, whatever is below it."""
    assert "opacity" not in svg._STYLE


def test_every_picture_has_a_description() -> None:
    short = []
    for page in PAGES:
        text = without_blocks(page.read_text(encoding="utf-8"))
        for words, path in re.findall(r"!\[([^\]]*)\]\(([^)]+)\)", text):
            if len(words.split()) < 5:
                short.append(f"{page.relative_to(ROOT)}: {path}: {words!r}")
        short += [
            f"{page.relative_to(ROOT)}: {tag}" for tag in re.findall(r"<img (?![^>]*\balt=\"[^\"]+\")[^>]*>", text)
        ]
    assert short == []


def test_the_moving_picture_is_that_of_the_run() -> None:
    """It is up to date, needs no script, and stands still for readers who prefer less motion."""
    text = moving.moving(walk()) + "\n"
    assert moving.FILE.read_text(encoding="utf-8") == text
    assert "<script" not in text and "prefers-reduced-motion:reduce" in text and text.count("@keyframes") > 50
    assert str(moving.FILE.relative_to(ROOT)) in (ROOT / "README.md").read_text(encoding="utf-8").partition("## ")[0]


def test_every_picture_file_has_a_title() -> None:
    for picture in [*ROOT.glob("chapters/*/pictures/*.svg"), *ROOT.glob("docs/**/*.svg")]:
        head = picture.read_text(encoding="utf-8")[:3000]
        assert 'role="img"' in head and ("aria-label=" in head or "aria-labelledby=" in head), picture


def test_tables_fit_into_the_box_of_code() -> None:
    """Longer lines of code are wrapped on the site (test_site.py); in a table, a wrapped line cannot be read."""
    wide = []
    for page in PAGES:
        for unit in rendered.units(page.read_text(encoding="utf-8")):
            lines = [] if unit.hidden else unit.block.code.splitlines()
            lines += (unit.output or "").splitlines()
            wide += [
                f"{page.name}: {len(line)}: {line}" for line in lines if set(line) & set("│┃━─") and len(line) > COLUMNS
            ]
    assert wide == []


@pytest.mark.parametrize("page", [p for p in sorted((ROOT / "docs/benchmarks").glob("*.md")) if p.name not in LATER])
def test_benchmark_page_leads_with_a_chart(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    section = text.find("\n## ")
    picture = next((m.start() for m in re.finditer(r"\]\([\w./-]+\.svg\)", text)), len(text))
    second = text.find("\n## ", section + 1)
    assert picture < (second if second > 0 else len(text)), f"{page.name}: no chart before its second section"


def test_chart_shows_the_numbers_of_its_table() -> None:
    rows = table("benchmarks/attention.md", "## Decode")
    assert rows[0][:3] == ["16/8, 1 x 1024", "8.5", "7.8"]
    assert [number(cell) for cell in ("1,382", "209 to 228", "–", "1.46 ×", "12.85/s")] == [
        1382,
        218.5,
        None,
        1.46,
        12.85,
    ]
    drawn = bars("Times", ["a", "b"], [("x", ["10", "–"]), ("y", ["40", "5"])], limit=20)
    widths = re.findall(r'<rect class="(q\d)" [^>]*?width="([\d.]+)" [^>]*data-value', drawn)
    longest = max(float(wide) for _, wide in widths)
    assert [(hue, float(wide) / longest) for hue, wide in widths] == [("q0", 0.5), ("q1", 1.0), ("q1", 0.25)]
    assert ">40<" in drawn and 'class="cut"' in drawn


def test_tour_has_every_kind_of_stop() -> None:
    stops = tour(walk())
    assert len(stops) == len(FINDERS)
    assert [stop.step for stop in stops] == sorted(stop.step for stop in stops)
    assert {stop.panel for stop in stops} == {"timeline", "tree", "pages"}


def test_identity_files() -> None:
    config = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for key in ("logo", "favicon"):
        (path,) = re.findall(rf"^  {key}: (\S+)$", config, re.MULTILINE)
        assert (ROOT / "docs" / path).is_file()
    assert not re.search(r"https?://(?!www\.w3\.org)", (ROOT / "docs/assets/site.css").read_text(encoding="utf-8"))
