"""A prefix cache: a radix tree of pages, in which a leaf is evicted as a whole.

An edge holds whole pages of tokens. A lock counts a user on every node of its path.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from minisgl.core import I32
from minisgl.hooks import hookimpl
from minisgl.plugins.cache.base import InsertResult, Key, MatchResult

NO_PAGES = np.empty(0, np.int32)


@dataclass
class Tree:
    """A radix tree that evicts whole leaves, the least recently used first."""

    def build(self, page_size: int) -> TreeCache:
        return TreeCache(page_size)


class Node:
    """A node and the edge above it: token ids int32 ``[pages * page_size]``, and their pages int32 ``[pages]``."""

    def __init__(self, parent: Node | None, ids: I32, pages: I32):
        self.parent, self.ids, self.pages = parent, ids, pages
        self.children: dict[bytes, Node] = {}  # by the first page of tokens
        self.users = 0  # locks on this node or below
        self.stamp = 0  # time of the last use


class Handle:
    """The path from the root to ``node``, with the first ``used`` pages of the node's own edge.

    ``changes`` is the number of changes of the tree when the path was found.
    """

    def __init__(self, node: Node, used: int, changes: int):
        self.node, self.used, self.changes = node, used, changes


class TreeCache:
    """A radix tree with one root for each namespace. Implements `minisgl.plugins.cache.base.PrefixCache`."""

    reuses = True

    def __init__(self, page_size: int):
        self.page_size = page_size
        self.roots: dict[Hashable, Node] = {}
        self.evictable_pages = 0
        self.total_pages = 0
        self._clock = 0
        self._changes = 0  # splits and evictions: with another number, a handle may name another path

    # ---- match ---------------------------------------------------------------------------------------

    def match(self, key: Key) -> MatchResult:
        """Return the longest cached prefix of ``key``, in whole pages."""
        root = self.roots.get(key.namespace) or Node(None, NO_PAGES, NO_PAGES)
        return self._descend(root, 0, NO_PAGES, key)

    def rematch(self, key: Key, last: MatchResult) -> MatchResult:
        """Return what ``match(key)`` returns. Begin at ``last``, an earlier result, as long as its path is the same."""
        handle = last.handle
        if handle.changes != self._changes or not handle.used:
            return self.match(key)
        return self._descend(handle.node, handle.used, last.pages, key)

    def _descend(self, node: Node, used: int, pages: I32, key: Key) -> MatchResult:
        """Walk down from ``node``, of whose edge ``used`` pages are equal. ``pages`` are the pages so far."""
        found, at, end = [pages], len(pages), len(key.ids) // self.page_size
        if used < len(node.pages):  # the last walk ended inside of an edge, and the key is the same
            end = at
        while at < end and (child := node.children.get(self._page(key.ids, at))) is not None:
            node, used = child, self._common(child.ids, key.ids[at * self.page_size :])
            found.append(child.pages[:used])
            at += used
            if used < len(child.pages):
                break
        return MatchResult(Handle(node, used, self._changes), np.concatenate(found), self._unlocked(node, used))

    def _unlocked(self, node: Node, used: int) -> int:
        """Return how many pages of a path have no lock: of ``node``, ``used`` pages count."""
        count = used if node.users == 0 else 0
        while node.parent is not None:
            node = node.parent
            if node.users == 0:
                count += len(node.pages)
        return count

    # ---- lock ----------------------------------------------------------------------------------------

    def lock(self, handle: Handle) -> None:
        """Keep a prefix from eviction: count a user on every node of its path."""
        if handle.used < len(handle.node.pages):
            handle.node = self._split(handle.node, handle.used)
        self._clock += 1
        node = handle.node
        while node.parent is not None:
            if node.users == 0:
                self.evictable_pages -= len(node.pages)
            node.users += 1
            node.stamp = self._clock
            node = node.parent

    def unlock(self, handle: Handle) -> None:
        """Remove one user from every node of a prefix."""
        self._clock += 1
        node = handle.node
        while node.parent is not None:
            node.users -= 1
            node.stamp = self._clock
            if node.users == 0:
                self.evictable_pages += len(node.pages)
            node = node.parent

    # ---- insert --------------------------------------------------------------------------------------

    def insert(self, base: Handle | None, key: Key, start: int, pages: I32) -> InsertResult:
        """Insert the pages of ``key`` from page ``start`` on, below ``base``."""
        root = self.roots.setdefault(key.namespace, Node(None, NO_PAGES, NO_PAGES))
        node = root if base is None or base.node.parent is None else base.node
        ids, at, cached = key.ids[start * self.page_size :], 0, [NO_PAGES]
        while at < len(pages):
            rest = ids[at * self.page_size : len(pages) * self.page_size]
            child = node.children.get(self._page(rest, 0))
            if child is None:
                child = self._grow(node, rest, pages[at:])
            elif (used := self._common(child.ids, rest)) < len(child.pages):
                child = self._split(child, used)
            cached.append(child.pages)
            at += len(child.pages)
            node = child
        return InsertResult(Handle(node, len(node.pages), self._changes), np.concatenate(cached))

    def _grow(self, parent: Node, ids: I32, pages: I32) -> Node:
        """Add a leaf below ``parent``."""
        self._clock += 1
        node = Node(parent, ids.copy(), pages.copy())
        node.stamp = self._clock
        parent.children[self._page(ids, 0)] = node
        self.total_pages += len(pages)
        self.evictable_pages += len(pages)
        return node

    def _split(self, node: Node, at: int) -> Node:
        """Split the edge of ``node`` after ``at`` pages. Return the node of the first part."""
        assert node.parent is not None
        cut = at * self.page_size
        upper = Node(node.parent, node.ids[:cut], node.pages[:at])
        upper.users, upper.stamp = node.users, node.stamp
        node.parent.children[self._page(node.ids, 0)] = upper
        node.ids, node.pages, node.parent = node.ids[cut:], node.pages[at:], upper
        upper.children[self._page(node.ids, 0)] = node
        self._changes += 1
        return upper

    # ---- evict ---------------------------------------------------------------------------------------

    def evict(self, pages: int) -> I32:
        """Evict leaves without users until at least ``pages`` pages are evicted, and return these pages."""
        heap = [(node.stamp, id(node), node) for node in self._nodes() if self._can_go(node)]
        heapq.heapify(heap)
        evicted, count = [NO_PAGES], 0
        while count < pages and heap:
            node = heapq.heappop(heap)[2]
            parent = node.parent
            assert parent is not None
            del parent.children[self._page(node.ids, 0)]
            node.parent = None
            evicted.append(node.pages)
            count += len(node.pages)
            if self._can_go(parent):
                heapq.heappush(heap, (parent.stamp, id(parent), parent))
        self._changes += 1
        self.total_pages -= count
        self.evictable_pages -= count
        return np.concatenate(evicted)

    def _can_go(self, node: Node) -> bool:
        return not node.users and not node.children and node.parent is not None

    # ---- helpers -------------------------------------------------------------------------------------

    def _page(self, ids: I32, index: int) -> bytes:
        return ids[index * self.page_size : (index + 1) * self.page_size].tobytes()

    def _common(self, a: I32, b: I32) -> int:
        """Return how many whole pages at the start of ``a`` and ``b`` are equal."""
        n = min(len(a), len(b))
        different = np.flatnonzero(a[:n] != b[:n])
        return int(different[0] if len(different) else n) // self.page_size

    def _nodes(self) -> Iterator[Node]:
        stack = [child for root in self.roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def check(self) -> None:
        """Raise AssertionError if a page is in the tree twice, or if the pages are not those that were counted."""
        pages = [page for node in self._nodes() for page in node.pages.tolist()]
        assert len(set(pages)) == len(pages), "a page is in the tree twice"
        assert len(pages) == self.total_pages, f"the tree has {len(pages)} pages, total_pages is {self.total_pages}"


@hookimpl
def minisgl_configs() -> Any:
    yield "cache", "museum", Tree
