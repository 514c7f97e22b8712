"""One HTML page that scrubs through a run, or through two of them side by side: nothing else is needed to open it.

Makes what the page's script draws from: per step what changed in pages, page tables and tree. The script and the
styles are in `viewer/`; they know no trace format but this one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from minisgl.trace import events as ev
from minisgl.trace.check import check
from minisgl.trace.draw.svg import theme
from minisgl.trace.history import Turn, turns
from minisgl.trace.read import Trace
from minisgl.trace.state import CACHE, FREE, RETIRING, State
from minisgl.trace.tree import Node

__all__ = ["difference", "page", "run_data"]


def page(runs: Sequence[Trace], title: str = "") -> str:
    """The HTML of one run, or of two and where they first differ."""
    here = files("minisgl.trace") / "viewer"
    data: dict[str, Any] = {"runs": [run_data(trace) for trace in runs]}
    if len(runs) == 2:
        data["difference"] = difference(*runs)
    parts = {
        "title": escape(title or " and ".join(trace.name for trace in runs)),
        "style": theme(":root") + (here / "viewer.css").read_text("utf-8"),
        "script": (here / "viewer.js").read_text("utf-8"),
        "data": embed(data),
    }
    html = (here / "viewer.html").read_text("utf-8")
    for name, value in parts.items():
        html = html.replace(f"<!-- {name} -->", value)
    return html


def embed(data: Any) -> str:
    """JSON that can stand in a script element: nothing in it ends the element."""
    return json.dumps(data, separators=(",", ":")).replace("</", "<\\/").replace("<!--", "<\\!--")


def run_data(trace: Trace) -> dict[str, Any]:
    """A trace as the page's script wants it."""
    requests: dict[int, dict[str, Any]] = {}
    steps: list[dict[str, Any]] = []
    trees: list[Any] = []
    books = _Books()
    splits = 0
    for turn, state in turns(trace):
        for event in turn.events:
            if isinstance(event, ev.Add):
                requests[event.uid] = {"prompt": len(event.prompt), "most": event.max_tokens, "added": event.step}
            elif isinstance(event, ev.Finish):
                requests[event.uid] |= {"ended": event.step, "reason": event.reason}
        nodes = _nodes(state)
        if not trees or trees[-1] != nodes:
            trees.append(nodes)
        said = _said(turn, state.tree.splits - splits, trace.spec.page_size)
        splits = state.tree.splits
        steps.append(
            {
                "s": turn.step,
                "r": [[r.uid, r.start, r.count, int(r.decode) + 2 * r.lost, r.cached]
                      for r in turn.rows],
                "w": turn.waiting,
                "e": said,
                "q": [state.count(FREE), state.count(CACHE), state.evictable, state.count(RETIRING)],
                "n": len(trees) - 1,
                **books.changes(state),
            }
        )  # fmt: skip
    violation = check(trace)
    return {
        "name": trace.name,
        "spec": trace.header.spec,
        "options": _options(trace),
        "requests": requests,
        "steps": steps,
        "trees": trees,
        "violation": violation
        and {
            "step": violation.step,
            "uid": violation.uid,
            "page": violation.page,
            "text": f"{violation.promise} is broken at {violation.where}: {violation.text}",
        },
    }


def _options(trace: Trace) -> str:
    options = trace.header.options
    names = ("model", "cache", "scheduler", "max_prefill_tokens", "overlap")
    values = {name: options[name] for name in names if name in options}
    words = [f"{n}={v['type'].lower() if isinstance(v, dict) else str(v).lower()}" for n, v in values.items()]
    spec = trace.spec
    return " ".join([*words, f"{spec.num_pages} pages of {spec.page_size} tokens, {spec.max_slots} slots"])


class _Books:
    """What changed since the step before: owners and users of pages, page tables of requests."""

    def __init__(self) -> None:
        self.owner: dict[int, int] = {}
        self.users: dict[int, int] = {}
        self.tables: dict[int, list[int]] = {}

    def changes(self, state: State) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for name, old, new in (("p", self.owner, state.owner), ("u", self.users, state.users)):
            rest = FREE if name == "p" else 0
            now = {i: v for i, v in enumerate(new.tolist()) if v != rest}
            changed = [[i, now.get(i, rest)] for i in sorted(old.keys() | now.keys()) if old.get(i) != now.get(i)]
            old.clear()
            old.update(now)
            if changed:
                out[name] = changed
        tables = {}
        for req in state.running.values():
            row = state.table[req.slot]
            tables[req.uid] = row[row >= 0].tolist()
        gone = [[uid, None] for uid in self.tables if uid not in tables]
        fresh = [[uid, pages] for uid, pages in tables.items() if self.tables.get(uid) != pages]
        self.tables = tables
        if gone or fresh:
            out["t"] = [*gone, *fresh]
        return out


def _nodes(state: State) -> list[list[Any]]:
    """[parent's index or -1, pages, users, step of last use, requests whose prefix ends here], parents first."""
    ends: dict[int, list[int]] = {}
    for req in state.running.values():
        if req.shared:
            ends.setdefault(req.shared[-1], []).append(req.uid)
    index: dict[int, int] = {}
    out: list[list[Any]] = []
    for node in state.tree.nodes():
        index[id(node)] = len(out)
        out.append([_parent(node, index), list(node.pages), node.users, node.step, ends.get(node.pages[-1], [])])
    return out


def _parent(node: Node, index: dict[int, int]) -> int:
    return -1 if node.parent is None else index.get(id(node.parent), -1)


def _said(turn: Turn, splits: int, page_size: int) -> list[list[Any]]:
    """What happened, in words: [kind, uid or null, words]."""
    out: list[list[Any]] = []

    def say(kind: str, uid: int | None, words: str) -> None:
        out.append([kind, uid, words])

    for event in turn.events:
        match event:
            case ev.Add():
                say("add", event.uid, f"arrives: {len(event.prompt)} prompt tokens, up to {event.max_tokens} more")
            case ev.Match():
                found = len(event.pages)
                what = f"finds {found} page{_s(found)} in the cache, {found * page_size} of {event.tokens} tokens"
                say("match", event.uid, what if found else "finds nothing in the cache")
            case ev.Admit():
                say("admit", event.uid, f"takes slot {event.slot}")
            case ev.Allocate():
                for uid in dict.fromkeys(event.owners):
                    pages = [p for p, owner in zip(event.pages, event.owners, strict=True) if owner == uid]
                    say("allocate", uid, f"takes {_pages(pages)}")
            case ev.Evict():
                say("evict", None, f"the cache gives up {_pages(event.pages)}")
            case ev.Cache():
                if event.pages:
                    say("cache", event.uid, f"gives {_pages(event.pages)} to the cache")
                if twice := len(event.held) - len(event.pages):
                    say("cache", event.uid, f"computed {twice} page{_s(twice)} that the cache had: it uses the cache's")
            case ev.Free():
                if event.pages:
                    say("free", event.uid, f"gives back {_pages(event.pages)}")
            case ev.Retract():
                say("retract", event.uid, "is retracted: it waits again")
            case ev.Finish():
                say("finish", event.uid, f"ends: {event.reason}")
    if splits:
        say("split", None, f"the tree splits {splits} node{_s(splits)}")
    for row in turn.rows:
        if row.lost:
            say("lost", row.uid, "its token is discarded")
    return out


def _s(count: int) -> str:
    return "" if count == 1 else "s"


def _pages(pages: Sequence[int]) -> str:
    named = ", ".join(map(str, pages[:6])) + (", …" if len(pages) > 6 else "")
    return f"page {named}" if len(pages) == 1 else f"{len(pages)} pages: {named}"


# ---- two runs ----------------------------------------------------------------------------------------

Aspect = Callable[[Turn], Any]

ASPECTS: dict[str, Aspect] = {
    "rows (request, first position, count)": lambda t: sorted((r.uid, r.start, r.count) for r in t.rows),
    "cached tokens found (request, pages)": lambda t: sorted(
        (e.uid, len(e.pages)) for e in t.events if isinstance(e, ev.Match)
    ),
    "retracted requests": lambda t: sorted(e.uid for e in t.events if isinstance(e, ev.Retract)),
    "evicted pages, in number": lambda t: sum(len(e.pages) for e in t.events if isinstance(e, ev.Evict)),
    "requests that ended": lambda t: sorted((e.uid, e.reason) for e in t.events if isinstance(e, ev.Finish)),
    "tokens sampled": lambda t: [e.tokens for e in t.events if isinstance(e, ev.Done)],
}
"""In what two steps may differ, worst first. Page numbers are not compared: they mean nothing."""


def difference(one: Trace, other: Trace) -> dict[str, Any] | None:
    """The first step at which two runs differ: ``step`` and ``text``; None where they never do."""
    for (a, _), (b, _) in zip(turns(one), turns(other)):
        for what, aspect in ASPECTS.items():
            if aspect(a) != aspect(b):
                mine, theirs = _only(aspect(a), aspect(b))
                return {"step": a.step, "text": f"{what}: {mine} in {one.name}, {theirs} in {other.name}"}
    steps = [sum(isinstance(event, ev.Batch) for event in trace) for trace in (one, other)]
    if steps[0] != steps[1]:
        return {"step": min(steps), "text": f"one run has {steps[0]} steps, the other {steps[1]}"}
    return None


def _only(a: Any, b: Any) -> tuple[str, str]:
    """Two values in words, without what they have in common."""
    if isinstance(a, list) and isinstance(b, list):
        return _list([x for x in a if x not in b]), _list([x for x in b if x not in a])
    return str(a), str(b)


def _list(values: list[Any]) -> str:
    return (", ".join(map(str, values[:4])) + (", …" if len(values) > 4 else "")) or "none"
