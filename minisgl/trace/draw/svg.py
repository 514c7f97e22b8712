"""Writes SVG: marks, text, and a theme for light and dark pages.

This module does not know traces. A picture needs no script and no web font, and has a title and a description for
screen readers. Inside a page with a switch between light and dark, the picture follows the switch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from html import escape
from zlib import crc32

Data = dict[str, object]

__all__ = ["HUES", "LINE", "NARROW", "Picture", "figure"]

HUES = 8
"""Number of colours for requests: request ``uid`` has colour ``uid % HUES``. Class ``q0`` fills, ``s0`` draws lines."""
LINE = 16
"""Height of a line of text, in pixels."""
NARROW = 342.0
"""Largest width of a drawing, without its margins, that a phone of 390 pixels shows without scrolling."""

_LIGHT = {
    "ink": "#1f2430", "soft": "#5a6170", "line": "#d8d6cf", "paper": "#fcfbf8", "well": "#f1efe9",
    "prefill": "#b45309", "decode": "#2563eb", "cache": "#0b7a6b", "bad": "#c81e3a", "retire": "#6b7280",
    "on": "#ffffff", "heat": "#7ea4f5",
    "q0": "#3b6fd4", "q1": "#c2410c", "q2": "#7c3aed", "q3": "#a16207", "q4": "#be185d", "q5": "#0369a1",
    "q6": "#4d7c0f", "q7": "#6d4c41",
}  # fmt: skip
_DARK = {
    "ink": "#e6e8ee", "soft": "#a3abba", "line": "#3d4453", "paper": "#1e2129", "well": "#2a2f3a",
    "prefill": "#fbbf5c", "decode": "#7fb0ff", "cache": "#4fd1bd", "bad": "#ff7b8f", "retire": "#8b93a3",
    "on": "#12151c", "heat": "#2f5fc0",
    "q0": "#8ab4ff", "q1": "#ff9f6e", "q2": "#c4a2ff", "q3": "#e6c35c", "q4": "#ff94c2", "q5": "#6fd0ff",
    "q6": "#b6dc6a", "q7": "#d3b8a8",
}  # fmt: skip


def variables(colours: dict[str, str]) -> str:
    """Return colours as CSS custom properties."""
    return "".join(f"--mg-{name}:{value};" for name, value in colours.items())


def theme(selector: str) -> str:
    """Return the CSS of the colours for ``selector``.

    The page's colour scheme (of mkdocs-material) overrides the system's.
    """
    light, dark = variables(_LIGHT), variables(_DARK)

    def chosen(scheme: str) -> str:
        switch = f'[data-md-color-scheme="{scheme}"]'
        return f"{switch} {selector},{selector}{switch}"

    return (
        f"{selector}{{{light}}}@media (prefers-color-scheme:dark){{{selector}{{{dark}}}}}"
        f"{chosen('default')}{{{light}}}{chosen('slate')}{{{dark}}}"
    )


_STYLE = (
    theme("svg.mg")
    + "svg.mg{font:12px/1.3 ui-sans-serif,system-ui,sans-serif;color:var(--mg-ink)}"
    + "svg.mg text{fill:var(--mg-ink)}svg.mg .soft{fill:var(--mg-soft)}svg.mg .small{font-size:11px}"
    + "svg.mg .on{fill:var(--mg-on);font-weight:600}svg.mg .strong{font-weight:600}"
    + "svg.mg .mid{text-anchor:middle}svg.mg .end{text-anchor:end}"
    + "svg.mg .line{stroke:var(--mg-line);fill:none}svg.mg .well{fill:var(--mg-well)}"
    + "svg.mg .edge{stroke:var(--mg-soft);fill:none;stroke-width:1.5}"
    + "".join(f"svg.mg .{n}{{fill:var(--mg-{n})}}" for n in ("prefill", "decode", "cache", "bad", "retire"))
    + "".join(f"svg.mg .q{i}{{fill:var(--mg-q{i})}}" for i in range(HUES))
    + "".join(f"svg.mg .s{i}{{stroke:var(--mg-q{i});stroke-width:1.8;fill:none}}" for i in range(HUES))
    + "svg.mg .free{fill:var(--mg-well);stroke:var(--mg-line)}"
    + "svg.mg .lost{fill:none;stroke:var(--mg-bad);stroke-width:1.5}"
    + "svg.mg .accepted{fill:var(--mg-q6)}svg.mg .rejected{fill:var(--mg-bad)}"
    + "svg.mg .gain{fill:var(--mg-decode)}svg.mg .even{fill:var(--mg-line)}"
    + "svg.mg .price{fill:var(--mg-paper);stroke:var(--mg-prefill);stroke-width:1.8}"
    + "svg.mg .used{stroke:var(--mg-ink);stroke-width:1.5}svg.mg .tiny{stroke-width:0.6}"
    + "svg.mg .wait{stroke:var(--mg-soft);stroke-width:1.5;stroke-dasharray:1.5 3.5;stroke-linecap:round;fill:none}"
    + "svg.mg .badline{stroke:var(--mg-bad);stroke-width:2;fill:none}"
    + "svg.mg .cut{stroke:var(--mg-paper);stroke-width:4}"
    + "svg.mg .hatch{stroke:var(--mg-paper);stroke-width:1.5}svg.mg .back{fill:var(--mg-paper)}"
)


class Picture:
    """A picture to which marks are added; `render` returns its SVG. Coordinates and sizes are in pixels."""

    def __init__(self, kind: str, title: str):
        self.kind, self.title = kind, title
        self.width = self.height = 0.0
        self.desc = ""
        self._out: list[str] = []

    def _put(
        self, tag: str, attributes: dict[str, object], content: str = "", tip: str = "", data: Data | None = None
    ) -> None:
        named = "".join(f' {key}="{escape(_plain(value))}"' for key, value in attributes.items() if value is not None)
        named += "".join(
            f' data-{key}="{escape(_plain(value))}"' for key, value in (data or {}).items() if value is not None
        )
        inner = content + (f"<title>{escape(tip)}</title>" if tip else "")
        self._out.append(f"<{tag}{named}>{inner}</{tag}>" if inner else f"<{tag}{named}/>")

    def _grow(self, x: float, y: float) -> None:
        self.width, self.height = max(self.width, x), max(self.height, y)

    def rect(
        self, x: float, y: float, w: float, h: float, cls: str, *, r: float = 2, fade: float | None = None,
        tip: str = "", **data: object,
    ) -> None:  # fmt: skip
        """Add a box. ``fade`` is its opacity, ``tip`` its tooltip, ``data`` its ``data-…`` attributes."""
        self._grow(x + w, y + h)
        where: dict[str, object] = {"class": cls, "x": x, "y": y, "width": max(w, 0), "height": max(h, 0), "rx": r}
        self._put("rect", {**where, "opacity": fade}, "", tip, data)

    def text(self, x: float, y: float, words: object, cls: str = "", **data: object) -> None:
        """Add text whose baseline begins at (x, y)."""
        word = str(words)
        wide = len(word) * (6.1 if "small" in cls else 6.8)
        self._grow(x + (0 if "end" in cls else wide / 2 if "mid" in cls else wide), y + 4)
        self._put("text", {"class": cls or None, "x": x, "y": y}, escape(word), "", data)

    def path(self, points: Iterable[tuple[float, float]], cls: str = "line", tip: str = "", **data: object) -> None:
        """Add a line through points."""
        points = list(points)
        for x, y in points:
            self._grow(x, y)
        d = "M" + "L".join(f"{_plain(x)} {_plain(y)}" for x, y in points)
        self._put("path", {"class": cls, "d": d}, "", tip, data)

    def dot(self, x: float, y: float, r: float, cls: str, tip: str = "", **data: object) -> None:
        """Add a circle of radius ``r`` around (x, y)."""
        self._grow(x + r, y + r)
        self._put("circle", {"class": cls, "cx": x, "cy": y, "r": r}, "", tip, data)

    def cross(self, x: float, y: float, r: float, tip: str = "", **data: object) -> None:
        """Add a red cross around (x, y)."""
        d = f"M{_plain(x - r)} {_plain(y - r)}l{2 * r} {2 * r}m0 {-2 * r}l{-2 * r} {2 * r}"
        self._put("path", {"class": "badline", "d": d}, "", tip, data)

    def legend(self, x: float, y: float, items: Iterable[tuple[str, str]], width: float = 10_000) -> float:
        """Add a legend of items (class, words), in lines of at most ``width``. Return the y below the legend."""
        at = x
        for cls, words in items:
            wide = 15 + len(words) * 7 + 16
            if at > x and at + wide > x + width:
                at, y = x, y + LINE + 2
            if cls == "wait" or cls[:1] == "s":
                self.path([(at, y - 4), (at + 10, y - 4)], cls)
            elif cls == "cross":
                self.cross(at + 5, y - 4, 4)
            else:
                self.rect(at, y - 9, 10, 10, cls)
            self.text(at + 15, y, words, "soft")
            at += wide
        return y + LINE

    def render(self, margin: float = 8) -> str:
        """Return the SVG element."""
        w, h = round(self.width + 2 * margin), round(self.height + 2 * margin)
        box = f"{-margin} {-margin} {w} {h}"
        ident = f"mg-{self.kind}-{crc32((self.title + ''.join(self._out)).encode()):08x}"
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="mg picture mg-{self.kind}" role="img" viewBox="{box}" '
            f'width="{w}" height="{h}" aria-labelledby="{ident}-t {ident}-d">'
            f'<title id="{ident}-t">{escape(self.title)}</title><desc id="{ident}-d">{escape(self.desc)}</desc>'
            f"<style>{_STYLE}</style>{''.join(self._out)}</svg>"
        )


def figure(svg: str, caption: str = "", narrow: str = "") -> str:
    """Return a ``<figure>`` with the picture, in which a wide picture scrolls on a narrow screen.

    A picture never shrinks, so that its text keeps its size. ``narrow`` is a second version of the picture: the site
    shows it on a narrow screen instead (``docs/assets/site.css``).
    """
    words = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    wide = re.search(r' width="(\d+)"', svg)
    if wide is not None:
        svg = svg.replace("<svg ", f'<svg style="min-width:{wide[1]}px" ', 1)
    svg += narrow.replace(" picture", " picture mg-narrow", 1)
    return f'<figure class="mg-figure" style="overflow-x:auto;margin:1em 0">{svg}{words}</figure>'


def _plain(value: object) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
