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

import numpy as np

from minisgl.core import I32, EngineSpec
from minisgl.trace import events as ev
from minisgl.trace.check import check
from minisgl.trace.draw.pages import shown, unused
from minisgl.trace.draw.svg import theme
from minisgl.trace.draw.tree import Text
from minisgl.trace.history import Turn, turns
from minisgl.trace.read import Trace
from minisgl.trace.state import CACHE, FREE, RETIRING, State
from minisgl.trace.summary import as_typed
from minisgl.trace.tree import Node

__all__ = ["difference", "frame", "page", "run_data"]


def page(runs: Sequence[Trace], text: Text | None = None, title: str = "") -> str:
    """The HTML of one run, or of two and where they first differ. With ``text`` (a tokenizer's ``decode``) the tree's
    nodes say what they hold."""
    here = files("minisgl.trace") / "viewer"
    data: dict[str, Any] = {"runs": [run_data(trace, text) for trace in runs]}
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


def frame(html: str, height: int = 720) -> str:
    """A page inside another one, for the site: ``height`` pixels, and nothing to fetch."""
    look = f"width:100%;height:{height}px;border:1px solid var(--md-default-fg-color--lightest,#ccc);border-radius:8px"
    return f'<iframe title="A run, step by step" style="{look}" srcdoc="{escape(html)}"></iframe>'


def embed(data: Any) -> str:
    """JSON that can stand in a script element: no tag begins in it."""
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


def run_data(trace: Trace, text: Text | None = None) -> dict[str, Any]:
    """A trace as the page's script wants it."""
    requests: dict[int, dict[str, Any]] = {}
    steps: list[dict[str, Any]] = []
    trees, books = _Trees(text), _Books(trace.spec)
    splits = 0
    for turn, state in turns(trace):
        for event in turn.events:
            if isinstance(event, ev.Add):
                requests[event.uid] = {"prompt": len(event.prompt_ids), "most": event.max_tokens, "added": event.step}
            elif isinstance(event, ev.Finish):
                requests[event.uid] |= {"ended": event.step, "reason": event.finish_reason}
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
                "n": trees.add(state),
                **books.changes(state),
            }
        )  # fmt: skip
    violation = check(trace)
    return {
        "name": trace.name,
        "spec": trace.header.spec,
        "options": _options(trace),
        "map": shown(trace),
        "unused": unused(trace),
        "requests": requests,
        "steps": steps,
        "trees": trees.trees,
        "lists": trees.lists,
        "texts": trees.texts,
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
    words = [f"{n}={as_typed(v)}" for n, v in values.items()]
    spec = trace.spec
    return " ".join([*words, f"{spec.num_pages} pages of {spec.page_size} tokens, {spec.max_running_requests} slots"])


class _Books:
    """What changed since the step before: owners and users of pages (``p`` and ``u``: [page, value]), page tables of
    requests (``t``: [uid, entries kept, entries after them], or [uid] where it has none any more)."""

    def __init__(self, spec: EngineSpec) -> None:
        self.owner: I32 = np.full(spec.num_pages, FREE, np.int32)
        self.users: I32 = np.zeros(spec.num_pages, np.int32)
        self.tables: dict[int, list[int]] = {}

    def changes(self, state: State) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for name, old, new in (("p", self.owner, state.owner), ("u", self.users, state.users)):
            changed = np.flatnonzero(old != new)
            if len(changed):
                out[name] = np.stack((changed, new[changed]), axis=1).tolist()
                old[:] = new
        tables = {req.uid: state.table[req.slot] for req in state.running.values()}
        moved: list[list[Any]] = [[uid] for uid in self.tables if uid not in tables]
        now = {uid: row[row >= 0].tolist() for uid, row in tables.items()}
        for uid, row in now.items():
            before = self.tables.get(uid, [])
            if row != before:
                keep = next((i for i, (a, b) in enumerate(zip(row, before)) if a != b), min(len(row), len(before)))
                moved.append([uid, keep, row[keep:]])
        self.tables = now
        if moved:
            out["t"] = moved
        return out


class _Trees:
    """Every tree that was seen, each list of pages (and its text, if asked for) once: a node is [parent's index or
    -1, number of its list of pages, users, step of last use, requests whose prefix ends there]."""

    def __init__(self, text: Text | None) -> None:
        self.text, self.texts = text, list[str]()
        self.trees: list[list[list[Any]]] = []
        self.lists: list[list[int]] = []
        self._numbers: dict[tuple[int, ...], int] = {}  # of pages, and of their tokens

    def add(self, state: State) -> int:
        """The number of the tree as it is now."""
        ends: dict[int, list[int]] = {}
        for req in state.running.values():
            if req.shared:
                ends.setdefault(req.shared[-1], []).append(req.uid)
        index: dict[int, int] = {}
        nodes: list[list[Any]] = []
        for node in state.tree.nodes():
            index[id(node)] = len(nodes)
            above, last = _parent(node, index), node.pages[-1]
            nodes.append([above, self._list(node.pages, state), node.users, node.step, ends.get(last, [])])
        if not self.trees or self.trees[-1] != nodes:
            self.trees.append(nodes)
        return len(self.trees) - 1

    def _list(self, pages: list[int], state: State) -> int:
        tokens = state.tokens(pages) if self.text else []
        key = (*pages, -1, *tokens)
        if key not in self._numbers:
            self._numbers[key] = len(self.lists)
            self.lists.append(list(pages))
            if self.text:
                self.texts.append(self.text(tokens))
        return self._numbers[key]


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
                say("add", event.uid, f"arrives: {len(event.prompt_ids)} prompt tokens, up to {event.max_tokens} more")
            case ev.Match():
                found = len(event.pages)
                what = f"finds {found} page{_s(found)} in the cache, {found * page_size} of {event.tokens} tokens"
                say("match", event.uid, what if found else "finds nothing in the cache")
            case ev.Admit():
                say("admit", event.uid, f"takes slot {event.req_pool_idx}")
            case ev.Allocate():
                for uid in dict.fromkeys(event.owners):
                    pages = [p for p, owner in zip(event.pages, event.owners, strict=True) if owner == uid]
                    say("allocate", uid, f"takes {_pages(pages)}")
            case ev.Evict():
                say("evict", None, f"the cache gives up {_pages(event.pages)}")
            case ev.Cache():
                if event.pages:
                    say("cache", event.uid, f"gives {_pages(event.pages)} to the cache")
                if twice := len(event.cached_pages) - len(event.pages):
                    say("cache", event.uid, f"computed {twice} page{_s(twice)} that the cache had: it uses the cache's")
            case ev.Free():
                if event.pages:
                    say("free", event.uid, f"gives back {_pages(event.pages)}")
            case ev.Retract():
                say("retract", event.uid, "is retracted: it waits again")
            case ev.Finish():
                say("finish", event.uid, f"ends: {event.finish_reason}")
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
    "requests that ended": lambda t: sorted((e.uid, e.finish_reason) for e in t.events if isinstance(e, ev.Finish)),
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
