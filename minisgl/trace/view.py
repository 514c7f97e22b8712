"""The viewer: one HTML page that replays a run, or two runs side by side, step by step.

The page contains everything it needs. This module computes the data from which the page's script draws: for each step,
what changed in the pages, the page tables and the tree. The script and the styles are in `viewer/`. They read only
these data, not the trace format.
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
from minisgl.trace.history import Row, Turn, turns
from minisgl.trace.read import Trace
from minisgl.trace.state import CACHE, FREE, RETIRING, State
from minisgl.trace.summary import format_option
from minisgl.trace.tour import tour
from minisgl.trace.tree import Node

__all__ = ["difference", "frame", "page", "run_data"]


def page(runs: Sequence[Trace], text: Text | None = None, title: str = "") -> str:
    """Return the HTML page of one run with a short tour, or of two runs with their first difference.

    With ``text`` (a tokenizer's ``decode``), the nodes of the tree show the text of their tokens.
    """
    here = files("minisgl.trace") / "viewer"
    data: dict[str, Any] = {"runs": [run_data(trace, text) for trace in runs]}
    if len(runs) == 2:
        data["difference"] = difference(*runs)
    else:
        data["tour"] = [stop._asdict() for stop in tour(runs[0])]
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
    """Return an ``<iframe>`` of ``height`` pixels that contains the page ``html``, to embed it in another page."""
    look = f"width:100%;height:{height}px;border:1px solid var(--md-default-fg-color--lightest,#ccc);border-radius:8px"
    return f'<iframe title="A run, step by step" style="{look}" srcdoc="{escape(html)}"></iframe>'


def embed(data: Any) -> str:
    """Return JSON that is safe inside a ``<script>`` element: it contains no ``<``."""
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


def run_data(trace: Trace, text: Text | None = None) -> dict[str, Any]:
    """Return the data of one run for the page's script."""
    requests: dict[int, dict[str, Any]] = {}
    steps: list[dict[str, Any]] = []
    trees, changes = _Trees(text), _Changes(trace.spec)
    splits = 0
    for turn, state in turns(trace):
        for event in turn.events:
            if isinstance(event, ev.Now):
                for req in event.requests:
                    requests[req.uid] = {"prompt": req.prompt, "most": req.max, "added": req.added}
            elif isinstance(event, ev.Add):
                requests[event.uid] = {"prompt": len(event.prompt_ids), "most": event.max_tokens, "added": event.step}
            elif isinstance(event, ev.Finish):
                requests[event.uid] |= {"ended": event.step, "reason": event.finish_reason}
        descriptions = _describe(turn, state.tree.splits - splits, trace.spec.page_size)
        splits = state.tree.splits
        steps.append(
            {
                "s": turn.step,
                "r": [[r.uid, r.start, r.count, int(r.decode) + 2 * r.discarded, r.num_cached_tokens, *_drafts(r)]
                      for r in turn.rows],
                "w": turn.waiting,
                "e": descriptions,
                "q": [state.count(FREE), state.count(CACHE), state.num_evictable_pages, state.count(RETIRING)],
                "n": trees.add(state),
                **changes.update(state),
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
            "text": f"{violation.promise} is broken at {violation.location}: {violation.text}",
        },
    }


def _options(trace: Trace) -> str:
    options = trace.header.options
    names = ("model", "cache", "scheduler", "max_prefill_tokens", "overlap")
    values = {name: options[name] for name in names if name in options}
    given = [f"{n}={format_option(v)}" for n, v in values.items()]
    spec = trace.spec
    sizes = f"{spec.num_pages} pages of {spec.page_size} tokens, at most {spec.max_running_requests} running requests"
    return " ".join([*given, sizes])


def _drafts(row: Row) -> tuple[int, int | None] | tuple[()]:
    """Return the numbers of drafts and of accepted drafts of a verification row; nothing for other rows."""
    return (row.num_drafts, row.num_accepted) if row.num_drafts else ()


class _Changes:
    """What changed between two steps, for the page's script.

    ``p`` and ``u`` are pairs [page, value]: the new owner, and the new number of requests for which the page is locked.
    ``t`` are page tables: [uid, number of leading entries that stay, the new entries after them], or [uid] for a
    request that does not run any more.
    """

    def __init__(self, spec: EngineSpec) -> None:
        self.owner: I32 = np.full(spec.num_pages, FREE, np.int32)
        self.ref_counts: I32 = np.zeros(spec.num_pages, np.int32)
        self.page_tables: dict[int, list[int]] = {}

    def update(self, state: State) -> dict[str, Any]:
        """Return what changed since the last call."""
        out: dict[str, Any] = {}
        for name, old, new in (("p", self.owner, state.owner), ("u", self.ref_counts, state.ref_counts)):
            changed = np.flatnonzero(old != new)
            if len(changed):
                out[name] = np.stack((changed, new[changed]), axis=1).tolist()
                old[:] = new
        rows = {req.uid: state.page_table[req.req_pool_idx] for req in state.running.values()}
        new_tables = {uid: row[row >= 0].tolist() for uid, row in rows.items()}
        changed_tables: list[list[Any]] = [[uid] for uid in self.page_tables if uid not in new_tables]
        for uid, table in new_tables.items():
            previous = self.page_tables.get(uid, [])
            if table != previous:
                shorter = min(len(table), len(previous))
                same = next((i for i in range(shorter) if table[i] != previous[i]), shorter)
                changed_tables.append([uid, same, table[same:]])
        self.page_tables = new_tables
        if changed_tables:
            out["t"] = changed_tables
        return out


class _Trees:
    """The trees of a run; a tree that equals the tree before it is left out.

    A tree is a list of nodes. A node is [index of the parent or -1, index into ``lists``, users, step of the last use,
    uids of the requests whose prefix ends with this node]. ``lists`` contains each list of pages once, and ``texts``
    the text of its tokens.
    """

    def __init__(self, text: Text | None) -> None:
        self.text, self.texts = text, list[str]()
        self.trees: list[list[list[Any]]] = []
        self.lists: list[list[int]] = []
        self._indices: dict[tuple[int, ...], int] = {}  # (pages, -1, their token ids) -> index into lists

    def add(self, state: State) -> int:
        """Return the index of the current tree in ``trees``."""
        ends: dict[int, list[int]] = {}
        for req in state.running.values():
            if req.cached_pages:
                ends.setdefault(req.cached_pages[-1], []).append(req.uid)
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
        tokens = state.token_ids(pages) if self.text else []
        key = (*pages, -1, *tokens)
        if key not in self._indices:
            self._indices[key] = len(self.lists)
            self.lists.append(list(pages))
            if self.text:
                self.texts.append(self.text(tokens))
        return self._indices[key]


def _parent(node: Node, index: dict[int, int]) -> int:
    return -1 if node.parent is None else index.get(id(node.parent), -1)


def _describe(turn: Turn, splits: int, page_size: int) -> list[list[Any]]:
    """Return sentences on the events of a turn: [kind, uid or None, words]."""
    out: list[list[Any]] = []

    def add(kind: str, uid: int | None, words: str) -> None:
        out.append([kind, uid, words])

    for event in turn.events:
        match event:
            case ev.Add():
                add(
                    "add",
                    event.uid,
                    f"arrives: {len(event.prompt_ids)} prompt tokens, at most {event.max_tokens} output tokens",
                )
            case ev.Match():
                found = len(event.pages)
                words = f"has {found} page{_s(found)} in the cache: {found * page_size} of {event.num_tokens} tokens"
                add("match", event.uid, words if found else "has no prefix in the cache")
            case ev.Admit():
                add("admit", event.uid, f"is admitted, with request-pool row {event.req_pool_idx}")
            case ev.Allocate():
                for uid in dict.fromkeys(event.owners):
                    pages = [p for p, owner in zip(event.pages, event.owners, strict=True) if owner == uid]
                    add("allocate", uid, f"gets {_pages(pages)}")
            case ev.States():
                uids = {row.req_pool_idx: row.uid for row in turn.rows}
                for slot, index in event.loads:
                    add("state", uids.get(index), f"goes on with the saved state in slot {slot}")
                for number, position, slot in event.saves:
                    add("state", turn.rows[number].uid, f"its state at position {position} is saved in slot {slot}")
            case ev.Evict():
                add("evict", None, f"the cache evicts {_pages(event.pages)}")
            case ev.Cache():
                if event.pages:
                    add("cache", event.uid, f"inserts {_pages(event.pages)} into the cache")
                if n := len(event.cached_pages) - len(event.pages):
                    words = f"computed {n} page{_s(n)} that the cache already had, and now uses those of the cache"
                    add("cache", event.uid, words)
            case ev.Free():
                if event.pages:
                    add("free", event.uid, f"retires {_pages(event.pages)}")
            case ev.Retract():
                add("retract", event.uid, "is retracted, and waits again")
            case ev.Finish():
                add("finish", event.uid, f"ends: {event.finish_reason}")
    if splits:
        add("split", None, f"{splits} node{_s(splits)} of the tree split")
    for row in turn.rows:
        if row.discarded:
            add("discard", row.uid, "its sampled token is discarded")
        elif row.num_accepted is not None and row.num_drafts:
            add("verify", row.uid, f"{row.num_accepted} of {row.num_drafts} draft{_s(row.num_drafts)} accepted")
    return out


def _s(count: int) -> str:
    return "" if count == 1 else "s"


def _pages(pages: Sequence[int]) -> str:
    numbers = ", ".join(map(str, pages[:6])) + (", …" if len(pages) > 6 else "")
    return f"page {numbers}" if len(pages) == 1 else f"{len(pages)} pages: {numbers}"


# ---- two runs ----------------------------------------------------------------------------------------

Aspect = Callable[[Turn], Any]

ASPECTS: dict[str, Aspect] = {
    "rows (request, first position, count)": lambda t: sorted((r.uid, r.start, r.count) for r in t.rows),
    "cached tokens found (request, pages)": lambda t: sorted(
        (e.uid, len(e.pages)) for e in t.events if isinstance(e, ev.Match)
    ),
    "retracted requests": lambda t: sorted(e.uid for e in t.events if isinstance(e, ev.Retract)),
    "number of evicted pages": lambda t: sum(len(e.pages) for e in t.events if isinstance(e, ev.Evict)),
    "requests that ended": lambda t: sorted((e.uid, e.finish_reason) for e in t.events if isinstance(e, ev.Finish)),
    "tokens sampled": lambda t: [e.runs or e.tokens for e in t.events if isinstance(e, ev.Done)],
}
"""What is compared between two steps, in this order. Page numbers are not compared: any free page will do."""


def difference(one: Trace, other: Trace) -> dict[str, Any] | None:
    """Return the first step at which two runs differ (``step``) and the difference (``text``), or None."""
    for (a, _), (b, _) in zip(turns(one), turns(other)):
        for name, aspect in ASPECTS.items():
            if aspect(a) != aspect(b):
                first, second = _only(aspect(a), aspect(b))
                return {"step": a.step, "text": f"{name}: {first} in {one.name}, {second} in {other.name}"}
    steps = [sum(isinstance(event, ev.Batch) for event in trace) for trace in (one, other)]
    if steps[0] != steps[1]:
        return {"step": min(steps), "text": f"one run has {steps[0]} steps, the other {steps[1]}"}
    return None


def _only(a: Any, b: Any) -> tuple[str, str]:
    """Return two values as text; of two lists, only the elements that the other list lacks."""
    if isinstance(a, list) and isinstance(b, list):
        return _list([x for x in a if x not in b]), _list([x for x in b if x not in a])
    return str(a), str(b)


def _list(values: list[Any]) -> str:
    return (", ".join(map(str, values[:4])) + (", …" if len(values) > 4 else "")) or "none"
