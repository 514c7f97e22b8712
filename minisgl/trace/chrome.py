"""Converts a trace to the Trace Event Format, which chrome://tracing and ui.perfetto.dev open.

The result has three processes: the engine's steps, the phases of each request, and the counters of the page pool. Times
are on the scheduler's clock.
"""

from __future__ import annotations

from typing import Any

from minisgl.trace import events as ev
from minisgl.trace.history import turns
from minisgl.trace.read import Trace
from minisgl.trace.state import CACHE, FREE, RETIRING

__all__ = ["chrome"]

ENGINE, REQUESTS, POOL = 1, 2, 3


def chrome(trace: Trace) -> dict[str, Any]:
    """Return a trace as one JSON object.

    A step lasts from its launch until its result was read. The clock of a simulated engine counts steps, each of one
    second.
    """
    out: list[dict[str, Any]] = []
    for pid, name in ((ENGINE, "engine"), (REQUESTS, "requests"), (POOL, "pool")):
        out.append({"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}})
    begin = min((e.t for e in trace if isinstance(e, ev.Add | ev.Batch)), default=0.0)

    def micros(t: float) -> float:
        return round((t - begin) * 1e6, 3)

    def span(name: str, pid: int, tid: int, since: float, until: float, **args: Any) -> None:
        dur = max(round((until - since) * 1e6, 3), 0.0)
        out.append({"ph": "X", "name": name, "pid": pid, "tid": tid, "ts": micros(since), "dur": dur, "args": args})

    def instant(name: str, pid: int, tid: int, t: float, **args: Any) -> None:
        out.append({"ph": "i", "s": "t", "name": name, "pid": pid, "tid": tid, "ts": micros(t), "args": args})

    waiting_since: dict[int, float] = {}
    for turn, state in turns(trace):
        end = turn.read_at if turn.read_at is not None else turn.t
        prefill = sum(row.count for row in turn.rows if not row.decode)
        tid = turn.step % 2  # with overlap, two steps are in flight at a time, each in a line of its own
        kind = "decode" if not prefill else "prefill" if all(not row.decode for row in turn.rows) else "mixed"
        rows = len(turn.rows)
        span(f"{kind} {turn.step}", ENGINE, tid, turn.t, end, step=turn.step, rows=rows, prefill_tokens=prefill)
        for row in turn.rows:
            name = "verify" if row.num_drafts else "decode" if row.decode else "prefill"
            if row.uid in waiting_since:
                span("wait", REQUESTS, row.uid, waiting_since.pop(row.uid), turn.t)
            args: dict[str, Any] = {
                "step": turn.step,
                "start": row.start,
                "count": row.count,
                "cached": row.num_cached_tokens,
            }
            if row.num_drafts:
                args |= {"drafts": row.num_drafts, "accepted": row.num_accepted}
            span(name, REQUESTS, row.uid, turn.t, end, **args, kept=row.kept)
        for event in turn.events:
            match event:
                case ev.Add():
                    waiting_since.setdefault(event.uid, event.t)
                    out.append(_thread(event.uid, f"request {event.uid}"))
                case ev.Retract():
                    waiting_since[event.uid] = turn.t
                    instant("retract", REQUESTS, event.uid, turn.t, step=event.step)
                case ev.Finish():
                    if event.uid in waiting_since:
                        span("wait", REQUESTS, event.uid, waiting_since.pop(event.uid), event.t)
                    instant(f"finish: {event.finish_reason}", REQUESTS, event.uid, event.t, step=event.step)
                case ev.Evict():
                    instant("evict", POOL, 0, turn.t, step=event.step, pages=len(event.pages))
        owned = int((state.owner >= 0).sum())
        counts = {"requests": owned, "cached": state.count(CACHE), "retiring": state.count(RETIRING)}
        out.append(_counter("pages", turn.t, micros, {**counts, "free": state.count(FREE)}))
        out.append(_counter("waiting", turn.t, micros, {"requests": len(turn.waiting)}))
    return {"traceEvents": out, "displayTimeUnit": "ms", "otherData": {"minisgl": trace.header.minisgl}}


def _thread(uid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": REQUESTS, "tid": uid, "name": "thread_name", "args": {"name": name}}


def _counter(name: str, t: float, micros: Any, values: dict[str, int]) -> dict[str, Any]:
    return {"ph": "C", "name": name, "pid": POOL, "tid": 0, "ts": micros(t), "args": values}
