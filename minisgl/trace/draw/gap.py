"""The worst gap: when each token of a request came, counted in the work that the engine did in between."""

from __future__ import annotations

from collections.abc import Sequence

from minisgl.trace.draw.svg import HUES, LINE, Picture
from minisgl.trace.history import Gap, gaps, turns
from minisgl.trace.read import Trace

__all__ = ["gap"]

WIDTH, LEFT = 640, 56


def gap(runs: Sequence[tuple[str, Trace]], requests: int = 6) -> str:
    """SVG of (name, trace) each: the tokens of the requests with the first run's worst gaps, on one axis of tokens
    computed."""
    pic = Picture("gap", "Worst gap between two tokens of a request: " + " and ".join(name for name, _ in runs))
    found = [gaps(trace) for _, trace in runs]
    whole = [sum(turn.tokens for turn, _ in turns(trace)) for _, trace in runs]
    scale = WIDTH / max([1, *whole])
    worst_of: dict[int, int] = {}
    for each in found[0]:
        worst_of[each.uid] = max(worst_of.get(each.uid, 0), each.tokens)
    shown = sorted(sorted(worst_of, key=lambda uid: -worst_of[uid])[:requests])
    y = pic.legend(0, 10, [("decode", "a token reaches its request"), ("bad", "the longest gap")]) + 4
    said = []
    for (name, trace), seen in zip(runs, found, strict=True):
        worst = max(seen, key=lambda g: g.tokens, default=None)
        pic.text(0, y + 12, name, "strong")
        if worst is not None:
            pic.text(LEFT + WIDTH, y + 12, f"worst gap: {worst.tokens:,} tokens, of request {worst.uid}", "soft end")
            said.append(f"{name}: at worst, request {worst.uid} waits for {worst.tokens:,} tokens of work.")
        lines = shown if worst is None or worst.uid in shown else sorted([*shown[:-1], worst.uid])
        y = _lanes(pic, trace, worst, lines, scale, y + LINE + 6) + 12
    pic.text(LEFT + WIDTH, y, f"{max(whole, default=0):,} tokens computed", "small soft end")
    pic.desc = " ".join(said)
    return pic.render()


def _lanes(pic: Picture, trace: Trace, worst: Gap | None, uids: Sequence[int], scale: float, y: float) -> float:
    arrived: dict[int, list[tuple[int, int]]] = {}
    work, ends = 0, {}
    for turn, _ in turns(trace):
        work += turn.tokens
        ends[turn.step] = work
        for row in turn.rows:
            if row.gained:
                arrived.setdefault(row.uid, []).append((turn.step, work))
    for uid in uids:
        pic.dot(6, y + 6, 4, f"q{uid % HUES}")
        pic.text(16, y + 10, uid, "small")
        pic.path([(LEFT, y + 6), (LEFT + WIDTH, y + 6)], "line")
        if worst is not None and worst.uid == uid:
            x = LEFT + ends[worst.since] * scale
            pic.rect(x, y + 2, max((ends[worst.until] - ends[worst.since]) * scale, 2), 8, "bad", uid=uid, kind="worst",
                     since=worst.since, until=worst.until, tokens=worst.tokens,
                     tip=f"request {uid}: {worst.tokens:,} tokens between two of its own")  # fmt: skip
        for step, at in arrived.get(uid, []):
            pic.rect(LEFT + at * scale - 0.75, y, 1.5, 12, "decode", r=0.5, uid=uid, step=step, kind="token")
        y += 18
    return y
