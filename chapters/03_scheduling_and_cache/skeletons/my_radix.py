"""Lab radix: A prefix cache.

Grade it:  python -m minisgl.lab test radix     (`hint radix` for a hint)
Serve it:  python -m minisgl plugins=my_radix.py cache=mine
"""

# minisgl lab radix, skeleton 987c0ea6a6 (minisgl 0.2.0)

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from minisgl.core import I32, I64
from minisgl.hooks import hookimpl
from minisgl.kernel import compare
from minisgl.kvcache import InsertResult, Key, MatchResult

_NONE = np.empty(0, np.int32)


@dataclass
class Mine:
    """Share the KV of equal prefixes through a radix tree; evict the least recently used."""


class Node:
    """An edge of the tree and its lower end: ``ids`` [pages · page_size] and their ``pages`` [pages]."""

    __slots__ = ("children", "ids", "pages", "parent", "stamp", "users")

    def __init__(self, parent: Node | None, ids: I64, pages: I32):
        self.parent = parent
        self.ids = ids
        self.pages = pages
        self.children: dict[bytes, Node] = {}
        self.users = 0
        self.stamp = 0  # when it was last used, on the cache's own clock

    @property
    def is_leaf(self) -> bool:
        return not self.children


class Handle:
    """A prefix: the path down to ``node``, of which the first ``used`` pages count."""

    __slots__ = ("node", "used")

    def __init__(self, node: Node, used: int):
        self.node, self.used = node, used


class MyCache:
    """A radix tree over pages of ``page_size`` tokens, one root for each namespace."""

    reuses = True

    def __init__(self, page_size: int):
        self.page_size = page_size
        self.common_pages: compare.CommonPages = compare.common_pages
        self.roots: dict[Hashable, Node] = {}
        self.evictable_pages = 0
        self.total_pages = 0
        self._clock = 0
        self._heap: list[tuple[int, int, Node]] = []  # unused leaves by age; an entry may be out of date
        self._offers = 0
        self._nodes = 0

    # ---- looking up ----------------------------------------------------------------------------

    def match(self, key: Key) -> MatchResult:
        """The longest cached prefix of ``key``, in whole pages. No side effect."""
        # TODO radix.match
        # 1. Walk down from the root: a page of tokens leads to at most one child.
        # 2. An edge may be longer than what we share with it: count whole pages, and stop inside it.
        # 3. Nothing changes here: not the tree, and not the order of eviction.
        raise NotImplementedError

    def lock(self, handle: Handle) -> None:
        """Count a user on every node of the path; a node with users is not evicted."""
        # TODO radix.lock
        # 1. A handle that ends inside an edge gets a node of its own first.
        # 2. Every ancestor has this user too; what gains its first user is no longer evictable.
        raise NotImplementedError

    def unlock(self, handle: Handle) -> None:
        """Take the user off again; what has none left may be evicted, leaves first."""
        # TODO radix.lock
        # 3. Its age counts from now: until now it was in use.
        raise NotImplementedError

    # ---- growing ---------------------------------------------------------------------------------

    def _split(self, node: Node, at: int) -> Node:
        """Cut an edge after ``at`` pages; returns the new upper node."""
        # TODO radix.split
        # 1. The node itself becomes the lower part: whoever holds it still means its whole prefix.
        # 2. Its users use the upper part too, and it is as old.
        raise NotImplementedError

    def insert(self, base: Handle | None, key: Key, start: int, pages: I32) -> InsertResult:
        """Offer the pages of ``key`` from page ``start`` on, below ``base``; see `PrefixCache.insert`."""
        node = base.node if base is not None else self._root(key.namespace)
        used = len(node.pages)
        mine: list[I32] = []
        at, end = 0, len(pages)
        ids = key.ids[start * self.page_size : (start + end) * self.page_size]
        while at < end:
            child = node.children.get(self._page(ids, at))
            if child is None:
                node = self._grow(node, ids[at * self.page_size :], pages[at:])
                used = len(node.pages)
                mine.append(node.pages)
                break
            used = self._common(child.ids, ids[at * self.page_size :])
            mine.append(child.pages[:used])
            at += used
            if used < len(child.pages) and at < end:
                child = self._split(child, used)
            node = child
        return InsertResult(Handle(node, used), np.concatenate(mine) if mine else _NONE)

    def _grow(self, parent: Node, ids: I64, pages: I32) -> Node:
        self._clock += 1
        node = Node(parent, ids.copy(), pages.copy())
        node.stamp = self._clock
        parent.children[self._page(ids, 0)] = node
        self.total_pages += len(pages)
        self.evictable_pages += len(pages)
        self._nodes += 1
        self._offer(node)
        return node

    # ---- shrinking ---------------------------------------------------------------------------------

    def evict(self, pages: int) -> I32:
        """Give up ``pages`` pages, or as many as nobody uses: the least recently used first, from the ends of paths."""
        # TODO radix.evict
        # 1. The oldest unused leaf. An entry is out of date if its node was used, grew or went since.
        # 2. Only as much of it as is wanted: the front of a prefix is worth more than its end.
        # 3. A parent that has lost its last child is the next leaf.
        raise NotImplementedError

    def _is_candidate(self, node: Node) -> bool:
        return node.users == 0 and node.is_leaf and node.parent is not None

    def _offer(self, node: Node) -> None:
        """Put a node that may be evicted into the heap, and tidy the heap when most of it is out of date."""
        if not self._is_candidate(node):
            return
        self._offers += 1
        heapq.heappush(self._heap, (node.stamp, self._offers, node))
        if len(self._heap) > 2 * self._nodes + 64:
            live = {n: (s, i, n) for s, i, n in self._heap if s == n.stamp and self._is_candidate(n)}
            self._heap = list(live.values())
            heapq.heapify(self._heap)

    # ---- small parts ---------------------------------------------------------------------------------

    def _root(self, namespace: Hashable) -> Node:
        root = self.roots.get(namespace)
        if root is None:
            root = self.roots[namespace] = Node(None, np.empty(0, np.int64), _NONE)
        return root

    def _page(self, ids: I64, index: int) -> bytes:
        return ids[index * self.page_size : (index + 1) * self.page_size].tobytes()

    def _common(self, a: I64, b: I64) -> int:
        """Whole pages that a and b have in common at their start."""
        return self.common_pages(a, b, self.page_size)

    def nodes(self) -> Iterator[Node]:
        """Every node but the roots, parents before children."""
        stack = [child for root in self.roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def check(self) -> None:
        """Raise AssertionError where the tree, its counts or its heap are wrong."""
        seen: set[int] = set()
        held = evictable = count = 0
        offered = {id(n) for s, _, n in self._heap if s == n.stamp}
        for root in self.roots.values():
            assert len(root.pages) == 0 and root.parent is None, "a root holds pages"
            assert root.users >= sum(c.users for c in root.children.values()), "a root lost users"
        for node in self.nodes():
            count += 1
            pages = node.pages.tolist()
            assert pages and len(node.ids) == len(pages) * self.page_size, "an edge is empty or not whole pages"
            assert node.parent is not None and node.parent.children.get(self._page(node.ids, 0)) is node, (
                "a node is not where its first page leads"
            )
            assert seen.isdisjoint(pages) and len(set(pages)) == len(pages), "a page stands twice in the tree"
            seen.update(pages)
            assert node.users >= sum(c.users for c in node.children.values()), "a child has users its parent lacks"
            for page, child in node.children.items():
                assert child.parent is node and self._page(child.ids, 0) == page, "a child is in the wrong place"
            held += len(pages)
            if node.users == 0:
                evictable += len(pages)
                assert not node.is_leaf or id(node) in offered, "an unused leaf that eviction can't find"
        assert held == self.total_pages, f"{held} pages in the tree, {self.total_pages} in the books"
        assert evictable == self.evictable_pages, f"{evictable} pages are unused, {self.evictable_pages} in the books"
        assert count == self._nodes, f"{count} nodes in the tree, {self._nodes} in the books"


@hookimpl
def minisgl_configs() -> Any:
    yield "cache", "mine", Mine


@hookimpl
def minisgl_cache(config: Any, page_size: int) -> MyCache | None:
    if not isinstance(config, Mine):
        return None
    cache = MyCache(page_size)
    return cache
