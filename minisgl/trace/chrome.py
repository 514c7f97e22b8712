"""A trace in the Trace Event Format, which chrome://tracing and ui.perfetto.dev open.

Three processes: the engine's steps, each request's life, and the pool's counters. Times are the scheduler's clock.
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
    """The whole trace as one JSON object. A step is as long as from its launch to its result's reading; a simulated
    engine's clock counts steps, of one second each."""
    out: list[dict[str, Any]] = []
    for pid, name in ((ENGINE, "engine"), (REQUESTS, "requests"), (POOL, "pool")):
        out.append({"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}})
    begin = min((e.t for e in trace if isinstance(e, ev.Add | ev.Batch)), default=0.0)

    def micros(t: float) -> float:
        return round((t - begin) * 1e6, 3)

    def span(what: str, pid: int, tid: int, since: float, until: float, **args: Any) -> None:
        dur = max(round((until - since) * 1e6, 3), 0.0)
        out.append({"ph": "X", "name": what, "pid": pid, "tid": tid, "ts": micros(since), "dur": dur, "args": args})

    def instant(name: str, pid: int, tid: int, t: float, **args: Any) -> None:
        out.append({"ph": "i", "s": "t", "name": name, "pid": pid, "tid": tid, "ts": micros(t), "args": args})

    waits: dict[int, float] = {}
    for turn, state in turns(trace):
        end = turn.read if turn.read is not None else turn.t
        prefill = sum(row.count for row in turn.rows if not row.decode)
        lane = turn.step % 2  # two may be in flight
        kind = "decode" if not prefill else "prefill" if all(not row.decode for row in turn.rows) else "mixed"
        rows = len(turn.rows)
        span(f"{kind} {turn.step}", ENGINE, lane, turn.t, end, step=turn.step, rows=rows, prefill_tokens=prefill)
        for row in turn.rows:
            name = "decode" if row.decode else "prefill"
            if row.uid in waits:
                span("wait", REQUESTS, row.uid, waits.pop(row.uid), turn.t)
            args = {"step": turn.step, "start": row.start, "count": row.count, "cached": row.cached}
            span(name, REQUESTS, row.uid, turn.t, end, **args, gained=row.gained)
        for event in turn.events:
            match event:
                case ev.Add():
                    waits.setdefault(event.uid, event.t)
                    out.append(_thread(event.uid, f"request {event.uid}"))
                case ev.Retract():
                    waits[event.uid] = turn.t
                    instant("retract", REQUESTS, event.uid, turn.t, step=event.step)
                case ev.Finish():
                    if event.uid in waits:
                        span("wait", REQUESTS, event.uid, waits.pop(event.uid), event.t)
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
