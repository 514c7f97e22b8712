"""The drawing of an engine whose parts are a student's or shipped: as text for a terminal, and as a picture.

Both have the boxes of docs/architecture.md: a request's way through the processes, and inside the scheduler and the
engine the parts that labs replace. Knows the groups of parts, and no lab by name.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from minisgl.chapters.lab.mine.engine import OwnPart
from minisgl.trace.draw.svg import Picture

__all__ = ["Line", "draw_picture", "draw_text", "is_coloured", "is_utf8", "lines_of"]

WAY = ("client", "API server", "tokenizer", "scheduler", "engine", "detokenizer", "client")
"""The processes that a request passes, in order."""
NAMES = {
    "scheduler": ("scheduler", "policy"),
    "cache": ("scheduler", "prefix cache"),
    "window": ("scheduler", "pages of windows"),
    "speculation": ("scheduler", "drafts"),
    "grammar": ("scheduler", "grammar"),
    "observer": ("scheduler", "observer"),
    "graph": ("engine", "graph runner"),
    "models": ("engine", "decoder block"),
    "attention": ("engine", "attention"),
    "moe": ("engine", "experts"),
    "communicator": ("engine", "all-reduce"),
    "quantization": ("engine", "quantization"),
    "kernels": ("engine", "kernels"),
}
"""Hook of a lab, or its name → the box of its part, and the part's name in the drawing."""
BOXES = {"scheduler": "scheduler, rank 0", "engine": "engine, every rank"}
WIDTH = 62  # characters inside a box of the text drawing
_COLOURS = {"own": "\x1b[1;32m", "begun": "\x1b[33m", "shipped": "\x1b[2m", "off": "\x1b[0m"}


@dataclass(frozen=True)
class Line:
    """One part in a box. ``state``: ``own``, ``begun`` or ``shipped``. ``note`` says whose part the engine has."""

    box: str
    name: str
    state: str
    note: str


def lines_of(parts: Sequence[OwnPart]) -> list[Line]:
    """Return the lines of the drawing: one for each part that a lab replaces, in the order of `NAMES`, and then others.

    Of several labs of one group, the last finished one is the engine's; else the last one whose file exists.
    """
    found: list[tuple[int, Line]] = []
    order, seen = list(NAMES), set()
    for part in parts:
        hook = _kind(part)
        if hook in seen and hook != "observer":
            continue
        rivals = [other for other in parts if _kind(other) == hook] if part.lab.words else [part]
        if part.lab.words:
            seen.add(hook)
        best = next((other for other in reversed(rivals) if other.finished), None)
        best = best or next((other for other in reversed(rivals) if other.file is not None), part)
        box, name = NAMES.get(hook or "", ("engine" if hook else "scheduler", hook or "own package"))
        if hook == "observer":
            name = f"observer {best.lab.lab}"
        also = [other.path.name for other in rivals if other.finished and other is not best]
        found.append((order.index(hook) if hook in order else len(order), Line(box, name, *_state(best, also))))
    return [line for _, line in sorted(found, key=lambda each: each[0])]


def _kind(part: OwnPart) -> str | None:
    """Return the hook of a part, or the name of a lab whose part has a line of its own."""
    return part.lab.lab if part.lab.lab in NAMES else part.lab.hook


def _state(part: OwnPart, also: Sequence[str]) -> tuple[str, str]:
    if part.finished:
        return "own", part.path.name + (f" (and {', '.join(also)})" if also else "")
    absent = "none" if part.lab.hook in ("observer", "speculation", None) else "shipped"
    if part.file is None:
        return "shipped", absent
    done = "changed, open again" if part.changed else f"{part.green} of {part.total} gates"
    return "begun", f"{part.file.name}: {done}"


def is_utf8() -> bool:
    """Return whether standard output can show block and box characters."""
    return "utf" in (sys.stdout.encoding or "").lower()


def is_coloured() -> bool:
    """Return whether standard output is a terminal that shows colours; `NO_COLOR` turns them off (no-color.org)."""
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"


def draw_text(parts: Sequence[OwnPart], *, plain: bool = False, colour: bool = False) -> str:
    """Return the drawing for a terminal. ``plain``: with ASCII characters only."""
    lines = lines_of(parts)
    marks = {"own": "*", "begun": "~", "shipped": "."} if plain else {"own": "■", "begun": "◧", "shipped": "□"}
    arrow, cut = (" -> ", "...") if plain else (" → ", "…")
    out = [arrow.join(WAY), ""]
    for box, title in BOXES.items():
        inside = [line for line in lines if line.box == box]
        left = "+- " if plain else "╭─ "
        side, flat = ("|", "-") if plain else ("│", "─")
        out.append(left + title + " " + flat * (WIDTH - len(title) - 2) + ("+" if plain else "╮"))
        for line in inside:
            text = f"{marks[line.state]} {line.name:<16} {line.note}"
            text = (text if len(text) <= WIDTH else text[: WIDTH - len(cut)] + cut).ljust(WIDTH)
            text = f"{_COLOURS[line.state]}{text}{_COLOURS['off']}" if colour else text
            out.append(f"{side} {text}{side}")
        out.append(("+" if plain else "╰") + flat * (WIDTH + 1) + ("+" if plain else "╯"))
        if box == "scheduler":
            out.append("   | Step          ^ StepResult" if plain else "   ↓ Step          ↑ StepResult")
    own = sum(line.state == "own" for line in lines)
    out.append(f"{marks['own']} yours: {own} of {len(lines)}   {marks['begun']} begun, not used   "
               f"{marks['shipped']} shipped or absent")  # fmt: skip
    return "\n".join(out)


BOX_WIDTH, ROW, GAP = 400, 24, 70
"""Pixels: the width of a box, the height of a part, and the distance between the two boxes."""


def draw_picture(parts: Sequence[OwnPart], title: str = "My engine") -> str:
    """Return the drawing as SVG."""
    lines, pic = lines_of(parts), Picture("engine", title)
    pic.desc = "; ".join(
        f"{line.name}: {line.note if line.state != 'own' else 'own part, ' + line.note}" for line in lines
    )
    y = pic.legend(0, 12, [("cache", "yours"), ("price", "begun, not used"), ("even", "shipped or absent")])
    y += 10
    x = 0.0
    for i, name in enumerate(WAY):
        wide = len(name) * 7 + 14
        pic.rect(x, y, wide, 24, "free")
        pic.text(x + wide / 2, y + 16, name, "mid")
        if i + 1 < len(WAY):
            pic.text(x + wide + 4, y + 16, "→", "soft")
        x += wide + 22
    y += 46
    height = max(sum(line.box == box for line in lines) for box in BOXES) * ROW + 36
    for column, (box, name) in enumerate(BOXES.items()):
        left = column * (BOX_WIDTH + GAP)
        pic.rect(left, y, BOX_WIDTH, height, "well", r=6)
        pic.text(left + 12, y + 20, name, "strong")
        for row, line in enumerate(each for each in lines if each.box == box):
            top = y + 30 + row * ROW
            kind = {"own": "cache", "begun": "price", "shipped": "even"}[line.state]
            pic.rect(left + 12, top, 12, 12, kind, tip=f"{line.name}: {line.note}", part=line.name, state=line.state)
            pic.text(left + 32, top + 11, line.name, "strong" if line.state == "own" else "soft")
            note = line.note if len(line.note) <= 34 else line.note[:33] + "…"
            pic.text(left + 148, top + 11, note, "" if line.state == "own" else "soft")
    middle = BOX_WIDTH + GAP / 2
    pic.text(middle, y + height / 2 - 8, "Step →", "mid soft")
    pic.text(middle, y + height / 2 + 12, "← result", "mid soft")
    return pic.render()
