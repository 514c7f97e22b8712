"""The page map at a step: the pages and their owners. Of a large pool, only the pages that the run used are shown."""

from __future__ import annotations

from typing import Any

from minisgl.trace import events as ev
from minisgl.trace.draw.svg import HUES, Picture
from minisgl.trace.history import state_at
from minisgl.trace.read import Trace
from minisgl.trace.state import CACHE, FREE, RETIRING, State

__all__ = ["pages", "shown", "unused"]

WIDTH = 640
MAX_COMPLETE = 640
"""Pages of the largest pool of which all pages are shown, in ten lines."""


def shown(trace: Trace) -> list[int]:
    """Return the pages on the map, the same for every step: all of a small pool, else those in the run's events."""
    if trace.spec.num_pages <= MAX_COMPLETE:
        return list(range(trace.spec.num_pages))
    used: set[int] = set()
    for event in trace:
        used.update(event.page_table_updates[2] if isinstance(event, ev.Batch) else getattr(event, "pages", ()))
    return sorted(used)


def unused(trace: Trace) -> str:
    """Return how many pages are not on the map, in words, or an empty string."""
    more = trace.spec.num_pages - len(shown(trace))
    return f"and {more:,} more page{'' if more == 1 else 's'}, which this run never used" if more else ""


def pages(trace: Trace, step: int, tables: bool = False, title: str = "", width: float = WIDTH) -> str:
    """Return the SVG of the pool after ``step``. ``tables`` adds the page tables of the running requests."""
    state = state_at(trace, step)
    pic = Picture("pages", f"{title or 'Page map'} after step {step}")
    free, retiring, cached = state.count(FREE), state.count(RETIRING), state.count(CACHE)
    used = int(((state.owner == CACHE) & (state.ref_counts > 0)).sum())
    items = [("free", f"free: {free}"), ("q0", f"owned by a request: {int((state.owner >= 0).sum())}")]
    items += [("cache used", f"cached, in use: {used}"), ("cache", f"cached, evictable: {cached - used}")]
    items += [("retire", f"retiring: {retiring}")]
    y = pic.legend(0, 10, items, width) + 6
    if tables:
        y = _tables(pic, state, width, y)
    y = _pool(pic, state, shown(trace), width, y)
    if words := unused(trace):
        pic.text(0, y + 14, words, "soft")
    pic.desc = (
        f"After step {step} the pool of {state.spec.num_pages} pages has {free} free pages, "
        f"{int((state.owner >= 0).sum())} pages of requests, {cached} pages of the cache, and {retiring} retiring "
        f"pages. Requests use {used} pages of the cache."
    )
    return pic.render()


def _tables(pic: Picture, state: State, width: float, y: float) -> float:
    """Draw one line for each running request: its pages in order. Return the y below them."""
    longest = max((int((state.page_table[req.req_pool_idx] >= 0).sum()) for req in state.running.values()), default=1)
    cell = min(max((width - 90) / max(longest, 1), 8.0), 24.0)
    pic.text(0, y + 10, "page tables", "strong")
    y += 18
    for req in state.running.values():
        pic.dot(6, y + 10, 5, f"q{req.uid % HUES}")
        pic.text(16, y + 14, f"request {req.uid}")
        row = state.page_table[req.req_pool_idx]
        for column, page in enumerate(row[row >= 0].tolist()):
            tip = f"request {req.uid}, tokens from {column * state.spec.page_size} on: page {page}"
            _page(pic, state, page, 90 + column * cell, y, cell, tip, kind="entry", uid=req.uid, column=column)
        y += cell + 6
    pic.text(0, y + 14, "the pool", "strong")
    return y + 22


def _pool(pic: Picture, state: State, numbers: list[int], width: float, y: float) -> float:
    """Draw pages of the pool. Return the y below them."""
    columns = next((n for n in (16, 20, 32, 40, 64) if len(numbers) <= n * 10), 80)
    cell = width / columns
    for i, page in enumerate(numbers):
        tip = f"page {page}: {_words(state, page)}"
        _page(pic, state, page, i % columns * cell, y + i // columns * cell, cell, tip, kind="page")
    return y + -(-len(numbers) // columns) * cell


def _page(pic: Picture, state: State, page: int, x: float, y: float, cell: float, tip: str, **data: Any) -> None:
    owner, users = int(state.owner[page]), int(state.ref_counts[page])
    classes = {FREE: "free", RETIRING: "retire", CACHE: "cache used" if users else "cache"}
    cls = classes.get(owner, f"q{owner % HUES}")
    gap = 1.0 if cell > 8 else 0.5
    if cell <= 12:
        cls += " tiny"
    size = cell - 2 * gap
    pic.rect(x + gap, y + gap, size, size, cls, fade=None if owner != CACHE or users else 0.4, tip=tip,
             page=page, owner=owner, users=users, **data)  # fmt: skip
    if owner == RETIRING and size >= 8:
        pic.path([(x + gap + 2, y + gap + size - 2), (x + gap + size - 2, y + gap + 2)], "hatch")
    if size >= 15 and len(str(page)) * 5.6 < cell:
        words = {"free": "small soft mid", "cache": "small mid"}.get(cls, "small on mid")
        pic.text(x + cell / 2, y + cell / 2 + 3.5, page, words)


def _words(state: State, page: int) -> str:
    owner, users = int(state.owner[page]), int(state.ref_counts[page])
    if owner == CACHE:
        return f"owned by the cache, {users} user{'s' if users != 1 else ''}"
    return {FREE: "free", RETIRING: "retiring: a launched step may still access it"}.get(
        owner, f"owned by request {owner}"
    )
