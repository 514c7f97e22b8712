"""The picture of the worst gap: the tokens of requests, on an axis that counts the tokens computed by the engine."""

from __future__ import annotations

from collections.abc import Sequence

from minisgl.trace.draw.svg import HUES, LINE, Picture
from minisgl.trace.history import Gap, gaps, turns
from minisgl.trace.read import Trace

__all__ = ["gap"]

WIDTH, LEFT = 640, 56


def gap(runs: Sequence[tuple[str, Trace]], requests: int = 6, width: float = LEFT + WIDTH) -> str:
    """Return the SVG of one or more runs, given as (name, trace).

    It shows the tokens of ``requests`` requests: those with the longest gaps in the first run. All runs share one axis,
    which counts the positions that the engine has computed.
    """
    pic = Picture("gap", "Worst gap between two tokens of a request: " + " and ".join(name for name, _ in runs))
    found = [gaps(trace) for _, trace in runs]
    totals = [sum(turn.num_tokens for turn, _ in turns(trace)) for _, trace in runs]
    wide = width - LEFT
    scale = wide / max([1, *totals])
    longest: dict[int, int] = {}  # uid -> tokens that the engine computed in its longest gap
    for each in found[0]:
        longest[each.uid] = max(longest.get(each.uid, 0), each.num_tokens)
    shown = sorted(sorted(longest, key=lambda uid: -longest[uid])[:requests])
    y = pic.legend(0, 10, [("decode", "the request gains a token"), ("bad", "the longest gap")], width) + 4
    sentences = []
    for (name, trace), seen in zip(runs, found, strict=True):
        worst = max(seen, key=lambda g: g.num_tokens, default=None)
        pic.text(0, y + 12, name, "strong")
        if worst is not None:
            pic.text(width, y + 12, f"worst gap: {worst.num_tokens:,} tokens, request {worst.uid}", "soft end")
            sentences.append(
                f"{name}: the worst gap has {worst.num_tokens:,} tokens, computed while request {worst.uid} waited."
            )
        lines = shown if worst is None or worst.uid in shown else sorted([*shown[:-1], worst.uid])
        y = _lanes(pic, trace, worst, lines, scale, wide, y + LINE + 6) + 12
    pic.text(width, y, f"{max(totals, default=0):,} tokens computed", "small soft end")
    pic.desc = " ".join(sentences)
    return pic.render()


def _lanes(
    pic: Picture, trace: Trace, worst: Gap | None, uids: Sequence[int], scale: float, wide: float, y: float
) -> float:
    tokens: dict[int, list[tuple[int, int]]] = {}
    num_computed, ends = 0, {}
    for turn, _ in turns(trace):
        num_computed += turn.num_tokens
        ends[turn.step] = num_computed
        for row in turn.rows:
            if row.kept:
                tokens.setdefault(row.uid, []).append((turn.step, num_computed))
    for uid in uids:
        pic.dot(6, y + 6, 4, f"q{uid % HUES}")
        pic.text(16, y + 10, uid, "small")
        pic.path([(LEFT, y + 6), (LEFT + wide, y + 6)], "line")
        if worst is not None and worst.uid == uid:
            x = LEFT + ends[worst.since] * scale
            pic.rect(x, y + 2, max((ends[worst.until] - ends[worst.since]) * scale, 2), 8, "bad", uid=uid, kind="worst",
                     since=worst.since, until=worst.until, tokens=worst.num_tokens,
                     tip=f"request {uid}: {worst.num_tokens:,} tokens computed between two of its tokens")  # fmt: skip
        for step, at in tokens.get(uid, []):
            pic.rect(LEFT + at * scale - 0.75, y, 1.5, 12, "decode", r=0.5, uid=uid, step=step, kind="token")
        y += 18
    return y
