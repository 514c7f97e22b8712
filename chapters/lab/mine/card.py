"""The result card: a student's engine, its counts, the promises that held and the numbers to beat, as SVG and HTML.

Each file stands alone: it needs no network, no script and no font. A measurement of an earlier version of a file is not
shown as if it were of the current one: the card says that it is out of date.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from minisgl.chapters.lab.grader.gate import amount
from minisgl.chapters.lab.mine.drawing import draw_picture
from minisgl.chapters.lab.mine.engine import OwnPart, own_versions
from minisgl.chapters.lab.mine.rungs import COUNTS
from minisgl.chapters.lab.mine.schedules import CHECKED
from minisgl.trace.draw.svg import Picture, theme
from minisgl.utils.version import __version__

__all__ = ["Card", "draw_card", "html_card"]

PAGE = (
    theme(":root") + "body{margin:0 auto;max-width:860px;padding:16px;background:var(--mg-paper);color:var(--mg-ink);"
    "font:16px/1.5 ui-sans-serif,system-ui,sans-serif}h1{margin:0}h2{font-size:18px;margin:28px 0 8px}"
    "table{border-collapse:collapse;width:100%;font-size:14px}td,th{text-align:left;padding:4px 8px;"
    "border-bottom:1px solid var(--mg-line);vertical-align:top}td.n,th.n{text-align:right;"
    "font-variant-numeric:tabular-nums;white-space:nowrap}.soft{color:var(--mg-soft)}.wide{overflow-x:auto}"
    ".own{color:var(--mg-cache);font-weight:600}.bad{color:var(--mg-bad)}"
)


@dataclass(frozen=True)
class Card:
    """What a card shows.

    ``ladder`` and ``promises`` are the saved measurements, or None if there are none. ``museum`` is the line about the
    museum pieces.
    """

    name: str
    parts: Sequence[OwnPart]
    ladder: dict[str, Any] | None = None
    promises: dict[str, Any] | None = None
    museum: str = ""

    @property
    def headline(self) -> str:
        """The counts of finished labs and green gates, in a line."""
        finished = sum(part.finished for part in self.parts)
        green, total = sum(part.green for part in self.parts), sum(part.total for part in self.parts)
        beaten = sum(part.finished and part.stretch is not None and part.stretch[1] for part in self.parts)
        labs = f"{finished} of {len(self.parts)} labs done"
        return f"{labs}, {green} of {total} gates green, {amount(beaten, 'number')} beaten"

    def promises_line(self) -> str:
        """Return what the random schedules showed, in a line."""
        found = self.promises
        if found is None:
            return "No random schedules yet: python -m minisgl.lab promises"
        text = f"{found['runs']:,} random schedules, seed {found['seed']}: "
        if found["failed"] is None:
            text += f"promises {', '.join(map(str, CHECKED))} held in every one"
        else:
            text += f"schedule {found['failed']} failed: {found['text']}"
        return text + self._stale(found)

    def rungs(self) -> tuple[list[dict[str, Any]], str]:
        """Return the rows of the ladder, and a note if they are of earlier files."""
        if self.ladder is None:
            return [], "Not measured yet: python -m minisgl.lab ladder"
        return self.ladder["rungs"], self._stale(self.ladder).strip()

    def _stale(self, measured: dict[str, Any]) -> str:
        now = own_versions(self.parts)
        changed = sorted(lab for lab in {*now, *measured["files"]} if now.get(lab) != measured["files"].get(lab))
        return f" (out of date: {', '.join(changed)} changed since)" if changed else ""


def numbers(part: OwnPart) -> tuple[str, str]:
    """Return the task of a lab's number to beat, and the student's measurement."""
    stretch = part.lab.stretch
    if stretch is None:
        return "no number to beat", ""
    if not part.finished or part.stretch is None:
        return stretch.says, "not measured yet"
    counted, beaten = part.stretch
    return stretch.says, f"{counted}: {'beaten' if beaten else 'not beaten yet'}"


def rung_name(rung: dict[str, Any], parts: Sequence[OwnPart]) -> str:
    """Return the name of a row of the ladder."""
    part = next((part for part in parts if part.lab.lab == rung["lab"]), None)
    return "plain engine" if part is None else f"with {part.file.name if part.file else part.lab.file}"


def html_card(card: Card) -> str:
    """Return the card as an HTML page."""
    labs = []
    for part in card.parts:
        says, mine = numbers(part)
        mark = '<span class="own">done</span>' if part.finished else "changed, open again" if part.changed else "open"
        file = escape(part.file.name) if part.file else "–"
        labs.append(
            f"<tr><td>{escape(part.lab.lab)}</td><td>{file}</td><td>{mark}</td>"
            f'<td class="n">{part.green} of {part.total}</td>'
            f'<td>{_code(says)}<br><span class="{_kind(mine)}">{escape(mine)}</span></td></tr>'
        )
    rungs, note = card.rungs()
    heads = "".join(f'<th class="n">{name}</th>' for name in COUNTS.values())
    rows = "".join(_html_rung(rung, card) for rung in rungs)
    table = f"<table><tr><th>engine</th>{heads}</tr>{rows}</table>" if rungs else ""
    promises = "".join(f"<li>Promise {number}: {text}.</li>" for number, text in CHECKED.items())
    held = card.promises is not None and card.promises["failed"] is None
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">
<title>{escape(card.name)}: my engine</title><style>{PAGE}</style></head><body>
<h1>{escape(card.name)}</h1>
<p>{escape(card.headline)}. <span class="soft">minisgl {__version__}</span></p>
<p>{escape(card.museum)}</p>
<div class="wide">{draw_picture(card.parts, card.name)}</div>
<h2>Promises</h2><p class="{"own" if held else ""}">{escape(card.promises_line())}.</p>
<ul class="soft">{promises}</ul>
<h2>The ladder: exact counts on the workload of the course</h2>
<div class="wide">{table}</div><p class="soft">{escape(note)}</p>
<h2>Labs, and the number to beat of each</h2>
<div class="wide"><table>
<tr><th>lab</th><th>file</th><th></th><th class="n">gates</th><th>number to beat, and yours</th></tr>
{"".join(labs)}</table></div>
</body></html>
"""


def _code(text: str) -> str:
    """Return a text of a lab as HTML, with its `code` marked."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def _kind(measured: str) -> str:
    return "own" if measured.endswith(": beaten") else "soft"


def _html_rung(rung: dict[str, Any], card: Card) -> str:
    name = escape(rung_name(rung, card.parts))
    if "error" in rung:
        return f'<tr><td>{name}</td><td class="bad" colspan="{len(COUNTS)}">{escape(rung["error"])}</td></tr>'
    return f"<tr><td>{name}</td>" + "".join(f'<td class="n">{rung[key]:,}</td>' for key in COUNTS) + "</tr>"


WIDTH, LINE = 820, 18  # pixels


def draw_card(card: Card) -> str:
    """Return the card as one SVG picture."""
    pic = Picture("card", card.name)
    pic.desc = f"{card.headline}. {card.promises_line()}."
    pic.text(0, 16, card.name, "strong")
    pic.text(0, 36, f"{card.headline}. minisgl {__version__}", "soft")
    pic.text(0, 56, card.museum, "soft")
    y = _promises(pic, card, 82)
    y = _ladder(pic, card, y + 10)
    _labs(pic, card, y + 14)
    return _stacked(pic, draw_picture(card.parts, card.name))


def _promises(pic: Picture, card: Card, y: float) -> float:
    held = card.promises is not None and card.promises["failed"] is None
    pic.rect(0, y - 11, 12, 12, "cache" if held else "price")
    for line in textwrap.wrap(card.promises_line(), 112, max_lines=3, placeholder=" …"):
        pic.text(20, y, line)
        y += LINE
    return y


def _ladder(pic: Picture, card: Card, y: float) -> float:
    rungs, note = card.rungs()
    pic.text(0, y, "The ladder: exact counts on the workload of the course", "strong")
    if note:
        y += LINE
        pic.text(0, y, note, "soft")
    if not rungs:
        return y + LINE
    y += LINE
    for column, name in enumerate(COUNTS.values()):
        pic.text(330 + column * 112, y, name, "end soft")
    most = {key: max((rung.get(key, 0) for rung in rungs), default=1) or 1 for key in COUNTS}
    for rung in rungs:
        y += LINE + 4
        pic.text(0, y, rung_name(rung, card.parts), "")
        if "error" in rung:
            pic.text(200, y, rung["error"][:80], "bad")
            continue
        for column, key in enumerate(COUNTS):
            right = 330 + column * 112
            pic.text(right, y, f"{rung[key]:,}", "end")
            pic.rect(right - 90, y + 4, 90 * rung[key] / most[key], 3, "cache", r=1)
    return y + LINE + 4


def _labs(pic: Picture, card: Card, y: float) -> float:
    pic.text(0, y, "Labs, and each number to beat", "strong")
    for part in card.parts:
        y += LINE + 2
        kind = "cache" if part.finished else "price" if part.file else "even"
        pic.rect(0, y - 10, 12, 12, kind, tip=f"{part.lab.lab}: {part.green} of {part.total} gates", lab=part.lab.lab)
        pic.text(20, y, part.lab.lab, "strong" if part.finished else "soft")
        pic.text(150, y, f"{part.green} of {part.total}", "end")
        says, mine = numbers(part)
        text = mine or says
        pic.text(170, y, text if len(text) < 95 else text[:94] + "…", "" if part.finished else "soft")
    return y + LINE


def _stacked(below: Picture, above: str) -> str:
    """Return one SVG with the picture ``above`` over the marks of ``below``."""

    size = re.search(r'viewBox="(\S+) (\S+) (\S+) (\S+)" width="(\d+)" height="(\d+)"', above)
    assert size is not None
    height, wide = int(size[6]), int(size[5])
    svg = below.render()
    own = re.search(r'viewBox="(\S+) (\S+) (\S+) (\S+)" width="(\d+)" height="(\d+)"', svg)
    assert own is not None
    total, width = int(own[6]) + height, max(int(own[5]), wide)
    svg = svg.replace(own[0], f'viewBox="-8 -8 {width} {total}" width="{width}" height="{total}"', 1)
    end = svg.rindex("</svg>")
    inner = above.replace("<svg ", f'<svg x="-8" y="{int(own[6]) - 8}" ', 1)
    paper = f'<rect x="-8" y="-8" width="{width}" height="{total}" style="fill:var(--mg-paper)"/>'
    start = svg.index("</style>") + len("</style>")
    return svg[:start] + paper + svg[start:end] + inner + svg[end:]
