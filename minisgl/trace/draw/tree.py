"""The picture of the radix tree at a step: nodes from left to right, with their users and their last use."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from minisgl.trace.draw.svg import HUES, Picture
from minisgl.trace.history import state_at
from minisgl.trace.read import Trace
from minisgl.trace.state import State
from minisgl.trace.tree import Node

__all__ = ["tree"]

WIDTH, BOX = 640, 22
LABEL = 120
"""Width of the label to the right of a leaf, in a picture that is narrower than `WIDTH`."""
INNER, LEAF = 42, 28
"""Heights of a line: with an inner node first, which has its label below it, and with a leaf."""
MAX_UNUSED_LEAVES = 5
"""Number of unused leaves that are drawn below one node; if at least two are older, those are drawn as one mark."""
Text = Callable[[Sequence[int]], str]
"""A function from token ids to text."""


def tree(
    trace: Trace, step: int, text: Text | None = None, deepest: int = 0, title: str = "", width: float = WIDTH
) -> str:
    """Return the SVG of the tree after ``step``.

    With ``text`` (a tokenizer's ``decode``), the nodes show the text of their tokens. ``deepest`` is the least number
    of pages on the axis, so that several pictures can have one scale.
    """
    state = state_at(trace, step)
    nodes = list(state.tree.nodes())
    pic = Picture("tree", f"{title or 'Radix tree'} after step {step}")
    most = max([deepest, 1, *(node.depth + len(node.pages) for node in nodes)])
    drawing = _Drawing(
        pic, state, step, min(max((width if width >= WIDTH else width - LABEL) / most, 3.0), 34.0), text, width >= WIDTH
    )
    items = [("cache used", "in use"), ("cache", "unused: the paler, the longer ago")]
    top = pic.legend(0, 10, [*items, ("q0", "a request, at the end of its prefix")], width) + 10
    bottom = max(drawing.below(state.tree.root, top), top + LEAF)
    pic.path([(0, top - 2), (0, bottom - LEAF + BOX + 2)], "edge", "the root: the empty prefix")
    _axis(pic, most, drawing.unit, bottom, state.spec.page_size)
    pic.desc = _description(nodes, step, state.spec.page_size)
    return pic.render()


class _Drawing:
    """Draws a tree from left to right, ``unit`` pixels for each page. A node and its first child share a line."""

    def __init__(self, pic: Picture, state: State, step: int, unit: float, text: Text | None, wordy: bool):
        self.pic, self.state, self.step, self.unit, self.text, self.wordy = pic, state, step, unit, text, wordy
        self.ends: dict[int, list[int]] = {}
        for req in state.running.values():
            if req.cached_pages:
                self.ends.setdefault(req.cached_pages[-1], []).append(req.uid)

    def below(self, parent: Node, y: float) -> float:
        """Draw the descendants of a node whose line is at ``y``. Return the y below them."""
        unused = sorted((c for c in parent.children if not c.users and not c.children), key=lambda c: -c.stamp)
        hidden = set(map(id, unused[MAX_UNUSED_LEAVES:])) if len(unused) > MAX_UNUSED_LEAVES + 1 else set()
        x = (parent.depth + len(parent.pages)) * self.unit
        first = last = y
        for child in parent.children:
            if id(child) in hidden:
                continue
            last = y
            self.node(child, y)
            y = max(self.below(child, y), y + (INNER if child.children else LEAF))
        if hidden:
            last = y
            self.more(unused[MAX_UNUSED_LEAVES:], x, y)
            y += LEAF
        if parent.parent is not None and last > first:
            self.pic.path([(x, first + BOX / 2), (x, last + BOX / 2)], "edge")
        return y

    def node(self, node: Node, y: float) -> None:
        """Draw one node: a box, its label, and the requests whose prefix ends with the node."""
        pic, unit = self.pic, self.unit
        x, w = node.depth * unit, len(node.pages) * unit
        age = max(self.step - node.step, 0)
        fade = 1.0 if node.users else max(0.2, 0.4 * 0.93**age)
        ago = "now" if not age else f"{age} step{'s' if age > 1 else ''} ago"
        users = f"{node.users} user{'s' if node.users != 1 else ''}"
        content = self.text(self.state.token_ids(node.pages)).replace("\n", " ") if self.text else ""
        tip = f"{len(node.pages)} pages, {users}, last used {ago}: pages {', '.join(map(str, node.pages))}"
        tip += f'; "{content}"' if content else ""
        data = {"kind": "node", "pages": " ".join(map(str, node.pages)), "users": node.users, "age": age,
                "depth": node.depth}  # fmt: skip
        pic.rect(
            x + 1.5, y, max(w - 3, 2), BOX, "cache used" if node.users else "cache", r=4, fade=fade, tip=tip, **data
        )
        if unit >= 17:
            for i, page in enumerate(node.pages):
                pic.text(x + (i + 0.5) * unit, y + BOX / 2 + 4, page, "small on mid" if fade > 0.5 else "small mid")
        ends = self.ends.get(node.pages[-1], [])[:8]
        label = users if node.users else f"used {ago}"
        if not node.children:
            self.chips(ends, node, x + w + 11, y + BOX / 2)
            label += f" · {_cut(content, 60)}" if content and self.wordy else ""
            pic.text(x + w + 7 + len(ends) * 19, y + BOX / 2 + 4, label, "small soft")
            return
        room = w - 8 - 17 * len(ends)
        self.chips(ends, node, x + w - 10 - 17 * (len(ends) - 1), y + BOX + 4)
        short = f"{node.users} u." if node.users else f"{age} ago"
        left = int(room / 6.0) - len(label) - 3
        longer = [f"{label} · {_cut(content, left)}"] if content and left > 4 else []
        fits = (each for each in (*longer, label, short) if len(each) * 6.0 < room)
        pic.text(x + 4, y + BOX + 12, next(fits, ""), "small soft")

    def chips(self, uids: list[int], node: Node, x: float, y: float) -> None:
        """Draw the requests whose prefix ends with ``node``, as numbered circles from (x, y) on."""
        for i, uid in enumerate(uids):
            tip = f"request {uid} uses the prefix that ends here"
            self.pic.dot(x + 17 * i, y, 8, f"q{uid % HUES}", tip, kind="user", uid=uid, page=node.pages[-1])
            self.pic.text(x + 17 * i, y + 3.5, uid, "small on mid")

    def more(self, nodes: list[Node], x: float, y: float) -> None:
        """Draw unused leaves as one mark."""
        count = sum(len(node.pages) for node in nodes)
        self.pic.rect(x + 1.5, y, max(self.unit - 3, 4), BOX, "cache", r=4, fade=0.2, kind="more", nodes=len(nodes),
                      pages=" ".join(str(page) for node in nodes for page in node.pages))  # fmt: skip
        words = f"and {len(nodes)} older unused leaves with {count} pages"
        self.pic.text(x + max(self.unit, 6) + 6, y + BOX / 2 + 4, words, "small soft")


def _cut(words: str, most: int) -> str:
    return words if len(words) <= most else words[: max(most - 1, 0)] + "…"


def _axis(pic: Picture, most: int, unit: float, y: float, page_size: int) -> None:
    every = next((n for n in (1, 2, 5, 10, 20, 50, 100, 200) if n * unit >= 40), 500)
    for at in range(0, most + 1, every):
        pic.path([(at * unit, y), (at * unit, y + 4)], "line")
        pic.text(at * unit, y + 16, f"{at * page_size:,}", "small soft mid" if at else "small soft")
    pic.text(most * unit if most * unit > 100 else 0, y + 30, "prefix tokens", "small soft end" if most * unit > 100
             else "small soft")  # fmt: skip


def _description(nodes: list[Node], step: int, page_size: int) -> str:
    if not nodes:
        return f"After step {step} the tree is empty."
    used = [node for node in nodes if node.users]
    held, in_use = (sum(len(node.pages) for node in some) for some in (nodes, used))
    deepest = max(node.depth + len(node.pages) for node in nodes)
    return (
        f"After step {step} the tree has {_count(len(nodes), 'node')} with {_count(held, 'page')} of {page_size} "
        f"tokens. Requests use {_count(len(used), 'node')} with {_count(in_use, 'page')}. "
        f"The longest prefix has {_count(deepest, 'page')}."
    )


def _count(n: int, word: str) -> str:
    return f"{n} {word}" if n == 1 else f"{n} {word}s"
