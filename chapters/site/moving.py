"""The moving picture on top of the README: a small server that serves twelve requests, a step at a time.

``python -m minisgl.chapters.site.moving`` writes it. It is an SVG with CSS animations and no script, so GitHub shows
it, and it stands still for readers who prefer less motion.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from minisgl.chapters.site.home import walk
from minisgl.trace import events as ev
from minisgl.trace.draw.svg import HUES, Picture
from minisgl.trace.history import turns
from minisgl.trace.read import Trace
from minisgl.trace.state import CACHE, FREE, RETIRING, State

__all__ = ["FILE", "moving"]

FILE = Path(__file__).parents[2] / "docs" / "pictures" / "moving.svg"
SECONDS = 0.4
"""Seconds that a step is shown."""
STILL = 30
"""The step that is shown without motion."""
_LANE, _BAR, _ROW, _PAGE = 20, 190.0, 130.0, 26
_COLUMNS = 6


class Motion:
    """CSS animations that set properties of marks at the beginning of each step."""

    def __init__(self, steps: int):
        self.steps = steps
        self.css = [
            "@media (prefers-reduced-motion:reduce){svg.mg .moves{animation:none!important}}"
            f"svg.mg .moves{{animation:{steps * SECONDS:g}s step-end infinite}}"
        ]

    def add(self, states: Sequence[str]) -> str:
        """Add an animation through the declarations ``states``, one for each step. Return the classes of its mark."""
        name = f"m{len(self.css)}"
        frames = [
            f"{100 * i / self.steps:.2f}%{{{state}}}"
            for i, state in enumerate(states)
            if i == 0 or state != states[i - 1]
        ]
        self.css.append(
            f"@keyframes {name}{{{''.join(frames)}}}svg.mg .{name}{{animation-name:{name};{states[STILL]}}}"
        )
        return f"moves {name}"


def moving(trace: Trace) -> str:
    """Return the picture of a run: the progress of each request, the rows of each step, and the owner of each page."""
    uids = [event.uid for event in trace if isinstance(event, ev.Add)]
    bars: dict[int, list[str]] = {uid: [] for uid in uids}
    rows: dict[int, list[str]] = {uid: [] for uid in uids}
    pages: list[list[str]] = [[] for _ in range(trace.spec.num_pages)]
    most = max(row.count for turn, _ in turns(trace) for row in turn.rows)
    total = 0
    for turn, state in turns(trace):
        total += 1
        by_uid = {row.uid: row for row in turn.rows}
        for uid in uids:
            bars[uid].append(_progress(state, uid))
            row = by_uid.get(uid)
            width = 0.0 if row is None else max(_ROW * row.count / most, 5)
            kind = "decode" if row is not None and row.decode else "prefill"
            rows[uid].append(f"width:{width:.0f}px;fill:var(--mg-{kind})")
        for page, states in enumerate(pages):
            states.append(_owner(state, page))
    picture, motion = Picture("moving", "A small server, step by step"), Motion(total)
    picture.desc = (
        f"{len(uids)} requests run in {total} steps, in a pool of {len(pages)} pages. A bar shows how much of a request"
        " is computed, a second one the tokens of the step. Each page has the colour of its owner."
    )
    _draw(picture, motion, bars, rows, pages)
    return picture.render().replace("</style>", "".join(motion.css) + "</style>", 1)


def _draw(
    picture: Picture,
    motion: Motion,
    bars: dict[int, list[str]],
    rows: dict[int, list[str]],
    pages: list[list[str]],
) -> None:
    left = 72
    at_rows, at_pages = left + _BAR + 16, left + _BAR + _ROW + 40
    picture.text(left, 10, "computed of each request", "soft")
    picture.text(at_rows, 10, "tokens of this step", "soft")
    picture.text(at_pages, 10, "pages of the KV pool", "soft")
    for lane, uid in enumerate(bars):
        y = 20 + lane * _LANE
        picture.text(0, y + 11, f"request {uid}", "small soft")
        picture.rect(left, y, _BAR, 13, "well")
        picture.rect(left, y, _BAR, 13, motion.add(bars[uid]))
        picture.rect(at_rows, y, _ROW, 13, motion.add(rows[uid]))
    for page, states in enumerate(pages):
        x, y = at_pages + page % _COLUMNS * (_PAGE + 4), 20 + page // _COLUMNS * (_PAGE + 4)
        picture.rect(x, y, _PAGE, _PAGE, motion.add(states))
    y = 20 + len(bars) * _LANE + 14
    picture.legend(
        0,
        y,
        [("prefill", "prompt"), ("decode", "answer"), ("cache", "cached page"), ("well", "free page")],
        at_pages - 20,
    )


def _progress(state: State, uid: int) -> str:
    """Return the declarations of a request's bar: its length, and its colour, which is pale while it waits."""
    req = state.all_requests.get(uid)
    if req is None:
        return "width:0;opacity:1;fill:var(--mg-well)"
    share = req.num_computed_tokens / max(req.max_num_tokens - 1, 1)
    if req.finish_reason:
        return f"width:{_BAR:.0f}px;opacity:.25;fill:var(--mg-q{uid % HUES})"
    opacity = 1 if req.req_pool_idx >= 0 else 0.35
    return f"width:{max(_BAR * min(share, 1), 3):.0f}px;opacity:{opacity};fill:var(--mg-q{uid % HUES})"


def _owner(state: State, page: int) -> str:
    """Return the declarations of a page: the colour of its owner. A cached page without a user is pale."""
    owner = int(state.owner[page])
    if owner == CACHE:
        return f"fill:var(--mg-cache);opacity:{1 if state.ref_counts[page] else 0.4}"
    names = {FREE: "well", RETIRING: "retire"}
    return f"fill:var(--mg-{names.get(owner, f'q{owner % HUES}')});opacity:1"


def main() -> None:
    """Write the picture."""
    FILE.write_text(moving(walk()) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
