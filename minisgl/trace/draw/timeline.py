"""The batch timeline: a line for each request, a column for each step. Shows rows, drafts, waiting and retractions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from minisgl.trace import events as ev
from minisgl.trace.draw.svg import HUES, LINE, Picture
from minisgl.trace.history import Row, Turn, turns
from minisgl.trace.read import Trace

__all__ = ["timeline", "timelines"]

WIDTH = 720
"""Width of all columns together, unless the columns would become too narrow or too wide."""
LEFT = 64


def timeline(trace: Trace, steps: range | None = None, title: str = "", width: float = LEFT + WIDTH) -> str:
    """Return the SVG of a run, or of some of its steps."""
    return timelines([(title, trace)], steps, width)


def timelines(runs: Sequence[tuple[str, Trace]], steps: range | None = None, width: float = LEFT + WIDTH) -> str:
    """Return the SVG of several runs (name, trace), one below the other with the same columns."""
    all_turns = [[turn for turn, _ in turns(trace)] for _, trace in runs]
    steps = steps or range(max((len(seen) for seen in all_turns), default=0))
    names = " and ".join(name for name, _ in runs if name)
    pic = Picture("timeline", f"Batch timeline{': ' + names if names else ''}")
    cell = min(max((width - LEFT) / max(len(steps), 1), 3.0), 24.0)
    items = [("prefill", "prefill chunk"), ("decode", "decode")]
    if any(row.num_cached_tokens for seen in all_turns for turn in seen for row in turn.rows):
        items.append(("cache", "prefix from the cache"))
    if any(row.num_drafts for seen in all_turns for turn in seen for row in turn.rows):
        items += [("accepted", "accepted draft"), ("rejected", "rejected draft")]
    if any(turn.waiting for seen in all_turns for turn in seen):
        items.append(("wait", "waits"))
    if any(isinstance(event, ev.Retract) for _, trace in runs for event in trace):
        items.append(("cross", "retracted"))
    if any(row.discarded for seen in all_turns for turn in seen for row in turn.rows):
        items.append(("lost", "token discarded"))
    y = pic.legend(0, 10, items, width) + 4
    sentences = []
    for (name, _), seen in zip(runs, all_turns, strict=True):
        if name:
            last = f"{len(seen)} steps"
            pic.text(0, y + 12, name, "strong")
            pic.text(LEFT + cell * len(steps), y + 12, last, "soft end")
            y += LINE + 4
        y = _run(pic, [turn for turn in seen if turn.step in steps], steps, cell, y) + 14
        sentences.append(_description(name, seen))
    pic.desc = " ".join(sentences)
    return pic.render()


def _run(pic: Picture, seen: list[Turn], steps: range, cell: float, top: float) -> float:
    uids: list[int] = []
    for turn in seen:
        for uid in [*(row.uid for row in turn.rows), *turn.waiting]:
            if uid not in uids:
                uids.append(uid)
    high = 18 if len(uids) <= 24 else 12 if len(uids) <= 60 else 6
    line = {uid: top + i * high for i, uid in enumerate(uids)}
    bottom = top + len(uids) * high

    def x(step: int) -> float:
        return LEFT + (step - steps.start) * cell

    for step in steps:
        if (step - steps.start) % _every(cell) == 0:
            pic.path([(x(step), top - 2), (x(step), bottom + 2)], "line")
            pic.text(x(step) + cell / 2, bottom + 14, step, "small soft mid")
    pic.text(LEFT - 8, bottom + 14, "step", "small soft end")
    for i, uid in enumerate(uids):
        if high > 6 or i % 10 == 0:
            pic.dot(6, line[uid] + high / 2, min(4, high / 2 - 1), f"q{uid % HUES}")
            pic.text(16, line[uid] + high / 2 + 4, uid, "small" if high < 18 else "")
    waiting_since: dict[int, int] = {}
    for turn in seen:
        for uid in turn.waiting:
            waiting_since.setdefault(uid, turn.step)
        for row in turn.rows:
            if row.uid in waiting_since:
                _wait(pic, row.uid, x(waiting_since.pop(row.uid)), x(turn.step), line[row.uid] + high / 2)
            _cell(pic, turn, row, x(turn.step), line[row.uid] + 1.5, cell, high - 3)
        for event in turn.events:
            if isinstance(event, ev.Retract) and event.uid in line:
                x_mark = x(event.step) if event.step in steps else x(turn.step) + cell
                tip = f"request {event.uid} is retracted before step {event.step}"
                pic.cross(x_mark, line[event.uid] + high / 2, min(4, high / 3), tip, step=event.step, uid=event.uid,
                          kind="retract")  # fmt: skip
    for uid, since in waiting_since.items():
        _wait(pic, uid, x(since), x(steps.stop), line[uid] + high / 2)
    return _work(pic, seen, x, cell, bottom + 24)


def _wait(pic: Picture, uid: int, start: float, end: float, y: float) -> None:
    if end - start > 3:
        pic.path([(start + 2, y), (end - 2, y)], "wait", f"request {uid} waits", uid=uid, kind="wait")


def _cell(pic: Picture, turn: Turn, row: Row, x: float, y: float, w: float, h: float) -> None:
    kind = "decode" if row.decode else "prefill"
    gap = 1.0 if w > 7 else 0.4
    end = row.start + row.count - 1
    tip = f"step {turn.step}, request {row.uid}: {kind} of position{'s' if row.count > 1 else ''} {row.start}"
    tip += f" to {end}" if row.count > 1 else ""
    tip += f"; {row.num_cached_tokens} tokens from the cache" if row.num_cached_tokens else ""
    tip += "; its token is discarded" if row.discarded else ""
    if row.num_drafts and row.num_accepted is not None:
        tip += f"; {row.num_accepted} of {row.num_drafts} drafts accepted"
    data: dict[str, Any] = {"step": turn.step, "uid": row.uid, "kind": kind, "start": row.start, "count": row.count,
            "kept": int(row.kept)}  # fmt: skip
    pic.rect(x + gap, y, w - 2 * gap, h, "lost" if row.discarded else kind, tip=tip, **data)
    if row.num_drafts and row.num_accepted is not None:
        part, left = h / row.count, w - 2 * gap  # from the bottom: the row's own token, accepted drafts, rejected ones
        rejected = row.num_drafts - row.num_accepted
        for cls, count, below in (("rejected", rejected, 0), ("accepted", row.num_accepted, rejected)):
            if count:
                pic.rect(x + gap, y + part * below, left, part * count, cls, r=1, tip=tip, step=turn.step, uid=row.uid,
                         kind=cls, count=count)  # fmt: skip
    if row.num_cached_tokens and h >= 6:
        share = row.num_cached_tokens / (row.start + row.count)
        pic.rect(x + gap, y + h * (1 - share), w - 2 * gap, h * share, "cache", r=1, tip=tip,
                 step=turn.step, uid=row.uid, kind="cached", count=row.num_cached_tokens)  # fmt: skip
    label = str(row.count)
    if not row.decode and h >= 14 and w > 6.5 * len(label) + 4:
        pic.text(x + w / 2, y + h / 2 + 3.5, label, "small on mid")


def _work(pic: Picture, seen: list[Turn], x: Callable[[int], float], cell: float, top: float) -> float:
    """Draw the number of positions that each step computes, as bars. Return the y below them."""
    most, high = max((turn.num_tokens for turn in seen), default=1), 44.0
    pic.text(LEFT - 8, top + 8, f"{most:,}", "small soft end")
    pic.text(LEFT - 8, top + high, "tokens", "small soft end")
    for turn in seen:
        at = top + high
        for kind in ("decode", "prefill"):
            tokens = sum(row.count for row in turn.rows if row.decode == (kind == "decode"))
            tall = high * tokens / most
            if tokens:
                at -= tall
                tip = f"step {turn.step} computes {tokens:,} {kind} tokens"
                pic.rect(x(turn.step) + 0.5, at, cell - 1, tall, kind, r=0.5, tip=tip, step=turn.step,
                         kind=f"work-{kind}", tokens=tokens)  # fmt: skip
    pic.path([(x(seen[0].step) if seen else LEFT, top + high + 0.5), (x(seen[-1].step) + cell if seen else LEFT,
              top + high + 0.5)], "line")  # fmt: skip
    return top + high + 6


def _every(cell: float) -> int:
    """Return the distance of two step numbers on the axis, in columns."""
    return next((n for n in (1, 2, 5, 10, 20, 50, 100) if n * cell >= 26), 200)


def _description(name: str, seen: list[Turn]) -> str:
    """Return the description of the picture, for screen readers."""
    requests = len({row.uid for turn in seen for row in turn.rows})
    most = max((len(turn.rows) for turn in seen), default=0)
    prefill = sum(row.count for turn in seen for row in turn.rows if not row.decode)
    decode = sum(row.count for turn in seen for row in turn.rows if row.decode)
    return (
        f"{name + ': ' if name else ''}{requests} requests run in {len(seen)} steps. A step has at most {most} rows "
        f"and {max((turn.num_tokens for turn in seen), default=0):,} tokens. "
        f"{prefill:,} tokens are prefilled, and {decode:,} are decoded."
    )
