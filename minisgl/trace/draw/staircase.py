"""The staircase of one request: a prefill step computes many positions, a decode step computes one."""

from __future__ import annotations

from minisgl.trace.draw.svg import Picture
from minisgl.trace.history import Row, turns
from minisgl.trace.read import Trace, TraceError

__all__ = ["staircase"]

WIDTH, LEFT = 640, 64


def staircase(trace: Trace, uid: int, title: str = "", width: float = LEFT + WIDTH) -> str:
    """Return an SVG with a line for each step that has a row of request ``uid``, and a column for each position.

    Raises `TraceError` if no step has a row of the request.
    """
    seen: list[tuple[int, Row]] = [(turn.step, row) for turn, _ in turns(trace) for row in turn.rows if row.uid == uid]
    if not seen:
        raise TraceError(f"{trace.name} has no row of request {uid}.")
    pic = Picture("staircase", title or f"Prefill and decode of request {uid}")
    length = max(row.start + row.count for _, row in seen) + 1
    unit = min(max((width - LEFT) / length, 2.0), 22.0)
    high = 16 if len(seen) <= 40 else 8
    items = [("prefill", "computed by prefill"), ("decode", "computed by decode"), ("free", "KV that is read")]
    items += [("cache", "KV from the cache")] if seen[0][1].num_cached_tokens else []
    top = pic.legend(0, 10, items, width) + 16
    pic.text(64, top - 6, "position in the text →", "small soft")
    for i, (step, row) in enumerate(seen):
        y = top + i * high
        if high > 8 or i % 5 == 0:
            pic.text(56, y + high / 2 + 4, f"step {step}", "small soft end")
        if row.start:
            cls = "cache" if row.num_cached_tokens else "free"
            pic.rect(64, y + 1, row.start * unit - 1, high - 2, cls, fade=0.55, tip=f"step {step} reads the KV of "
                     f"positions 0 to {row.start - 1}", step=step, uid=uid, kind="read", count=row.start)  # fmt: skip
        kind = "decode" if row.decode else "prefill"
        tip = f"step {step}: {kind} of positions {row.start} to {row.start + row.count - 1}"
        pic.rect(64 + row.start * unit, y + 1, max(row.count * unit - 1, 1.5), high - 2, kind, tip=tip, step=step,
                 uid=uid, kind=kind, start=row.start, count=row.count)  # fmt: skip
        if row.count > 1 and high > 8:
            words = f"{row.count} tokens" + ("" if row.sample else ", a chunk")
            if row.count * unit > len(words) * 6.5:
                pic.text(64 + (row.start + row.count / 2) * unit, y + high / 2 + 3.5, words, "small on mid")
    steps = len(seen)
    prefill = [row for _, row in seen if not row.decode]
    decoded = sum(row.count for _, row in seen if row.decode)
    pic.desc = (
        f"Request {uid}: {len(prefill)} prefill step{'s' if len(prefill) != 1 else ''} compute"
        f"{'s' if len(prefill) == 1 else ''} {sum(row.count for row in prefill)} positions, then "
        f"{steps - len(prefill)} decode steps compute {'one each' if decoded == steps - len(prefill) else decoded}."
    )
    return pic.render()
