"""Lab radix: A prefix cache.

Grade it:  python -m minisgl.lab test radix     (`hint radix` for a hint)
Serve it:  python -m minisgl plugins=my_radix.py cache=mine
"""

# minisgl lab radix, skeleton b3ef343708 (minisgl 0.2.0)

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from minisgl.core import I32  # a numpy array of int32
from minisgl.hooks import hookimpl
from minisgl.plugins.cache import compare
from minisgl.plugins.cache.base import InsertResult, Key, MatchResult

_NONE = np.empty(0, np.int32)


@dataclass
class Mine:
    """A radix tree of prefixes: requests with an equal prefix share its KV pages. Eviction is least recently used."""

    def build(self, page_size: int) -> MyCache:
        cache = MyCache(page_size)
        return cache


class Node:
    """A node and the edge above it.

    ``ids`` are the edge's token ids, int32 ``[pages * page_size]``. ``pages`` hold their KV, int32 ``[pages]``.
    """

    __slots__ = ("children", "ids", "pages", "parent", "stamp", "users")

    def __init__(self, parent: Node | None, ids: I32, pages: I32):
        self.parent = parent
        self.ids = ids
        self.pages = pages
        self.children: dict[bytes, Node] = {}
        self.users = 0  # locks on this node or below
        self.stamp = 0  # time of the last use, on the cache's clock: its insert, or a later lock or unlock

    @property
    def is_leaf(self) -> bool:
        """Whether the node has no children."""
        return not self.children


class Root(Node):
    """The root of a namespace: the empty prefix. `RadixCache.roots` holds it only while it has children."""

    __slots__ = ("namespace",)

    def __init__(self, namespace: Hashable):
        super().__init__(None, _NONE, _NONE)
        self.namespace = namespace


class Handle:
    """A prefix: the path from the root to ``node``, with only the first ``used`` pages of the node's own edge.

    A handle from `match` is valid until the cache changes, also after further matches. After `lock`, it is valid until
    its `unlock`.
    """

    __slots__ = ("node", "used")

    def __init__(self, node: Node, used: int):
        self.node, self.used = node, used


class LeafQueue:
    """Leaves without users, each with the time of its last use: the least recently used first.

    Nearly every node is pushed with a later time than all before it, and waits in a queue: O(1). Only the others, such
    as a node that lost its last child, need a heap.
    """

    def __init__(self) -> None:
        self._queue: deque[tuple[int, int, Node]] = deque()  # (stamp, number, node), ascending
        self._heap: list[tuple[int, int, Node]] = []
        self._pushes = 0  # the number breaks the tie of equal stamps

    def push(self, node: Node) -> None:
        """Add a node with its current stamp."""
        self._pushes += 1
        entry = (node.stamp, self._pushes, node)
        if self._queue and node.stamp < self._queue[-1][0]:
            heapq.heappush(self._heap, entry)
        else:
            self._queue.append(entry)

    def pop(self) -> tuple[int, Node] | None:
        """Remove and return the entry with the lowest stamp: (stamp, node). Return None if the queue is empty.

        The entry may be outdated: the node was used again, got a child or was evicted since it was pushed.
        """
        if self._heap and (not self._queue or self._heap[0] < self._queue[0]):
            stamp, _, node = heapq.heappop(self._heap)
        elif self._queue:
            stamp, _, node = self._queue.popleft()
        else:
            return None
        return stamp, node

    def replace(self, nodes: Iterable[Node]) -> None:
        """Replace all entries by ``nodes``."""
        self._heap.clear()
        self._queue = deque(sorted((node.stamp, i, node) for i, node in enumerate(nodes)))
        self._pushes = len(self._queue)

    def __len__(self) -> int:
        return len(self._queue) + len(self._heap)

    def __iter__(self) -> Iterator[tuple[int, Node]]:
        """Yield all entries, in any order: (stamp, node)."""
        return ((stamp, node) for stamp, _, node in chain(self._queue, self._heap))


class MyCache:
    """A radix tree of pages of ``page_size`` tokens, with one root per namespace. Implements `PrefixCache`.

    A namespace without pages has no entry in ``roots``, so that namespaces of the past need no memory.
    """

    reuses = True

    def __init__(self, page_size: int):
        self.page_size = page_size
        self.common_pages: compare.CommonPages = compare.common_pages
        self.roots: dict[Hashable, Root] = {}
        self.evictable_pages = 0
        self.total_pages = 0
        self._clock = 0
        self._leaves = LeafQueue()
        self._nodes = 0

    # ---- match and lock ------------------------------------------------------------------------

    def match(self, key: Key) -> MatchResult:
        """Return the longest cached prefix of ``key``, in whole pages. No side effect."""
        # TODO radix.match
        # 1. Walk down from the root. The next page of tokens leads to at most one child.
        # 2. The key may differ from the edge within the edge. Count the equal whole pages, and stop there.
        # 3. A match changes neither the tree nor the order of eviction.
        raise NotImplementedError

    def lock(self, handle: Handle) -> None:
        """Count one user on every node of the prefix, the root included. A node with users is never evicted.

        The same ``handle`` is later passed to `insert` and `unlock`.
        """
        # TODO radix.lock
        # 1. If the prefix ends inside an edge, split the edge there first. Set the handle's node to the upper part. A
        #    handle may be locked again after another lock has split its edge: then `used` counts pages above it, too.
        #    A handle with the 5 pages of an edge of 5 keeps used=5 when the edge becomes 2 + 3: its node has 3 pages.
        # 2. Count the user on every ancestor too. The pages of a node with its first user are no longer evictable. A
        #    path may have more nodes than Python's recursion limit.
        raise NotImplementedError

    def unlock(self, handle: Handle) -> None:
        """Remove one user from every node of the prefix. A node without users can be evicted, leaves first."""
        # TODO radix.lock
        # 3. The prefix was in use until now, so its time of last use is now.
        raise NotImplementedError

    # ---- insert ----------------------------------------------------------------------------------

    def _split(self, node: Node, at: int) -> Node:
        """Split the edge of ``node`` after ``at`` pages. Return the new upper node."""
        # TODO radix.split
        # 1. `node` becomes the lower part, so that existing handles to `node` keep their whole prefix.
        # 2. Every user of the lower part also uses the upper part. Both parts have the same time of last use.
        raise NotImplementedError

    def insert(self, base: Handle | None, key: Key, start: int, pages: I32) -> InsertResult:
        """Insert the pages of ``key`` from page ``start`` on, below ``base``. See `PrefixCache.insert`."""
        node = base.node if base is not None else self._root(key.namespace)
        if isinstance(node, Root):  # the root of an empty namespace is replaced by the first that gets a child
            node = self.roots.get(node.namespace, node)
        used = len(node.pages)
        cached: list[I32] = []
        at, end = 0, len(pages)
        ids = key.ids[start * self.page_size : (start + end) * self.page_size]
        while at < end:
            child = node.children.get(self._page(ids, at))
            if child is None:
                node = self._grow(node, ids[at * self.page_size :], pages[at:])
                used = len(node.pages)
                cached.append(node.pages)
                break
            used = self._common(child.ids, ids[at * self.page_size :])
            cached.append(child.pages[:used])
            at += used
            if used < len(child.pages) and at < end:
                child = self._split(child, used)
            node = child
        return InsertResult(Handle(node, used), np.concatenate(cached) if cached else _NONE)

    def _grow(self, parent: Node, ids: I32, pages: I32) -> Node:
        """Add a leaf with ``ids`` and ``pages`` below ``parent``. Return it."""
        self._clock += 1
        node = Node(parent, ids.copy(), pages.copy())
        node.stamp = self._clock
        parent.children[self._page(ids, 0)] = node
        if isinstance(parent, Root):
            self.roots[parent.namespace] = parent
        self.total_pages += len(pages)
        self.evictable_pages += len(pages)
        self._nodes += 1
        self._offer(node)
        return node

    # ---- evict -------------------------------------------------------------------------------------

    def evict(self, pages: int) -> I32:
        """Evict and return ``pages`` pages without users, or all if there are fewer: least recently used first.

        Pages are evicted from the ends of paths. The order of the returned pages is free.
        """
        # TODO radix.evict
        # 1. Take the oldest leaf without users. Skip an entry if its node was since used, extended or removed.
        # 2. Evict no more pages than needed (the gates allow four more), from the end of the edge: every match
        #    begins at the front of a prefix.
        # 3. A parent without any child left is a leaf now, and can be evicted next.
        raise NotImplementedError

    def _is_candidate(self, node: Node) -> bool:
        return node.users == 0 and not node.children and node.parent is not None

    def _offer(self, node: Node) -> None:
        """Add a node to the leaves that can be evicted, if it is one. Drop a root that has no children.

        If most entries are outdated, remove them.
        """
        if node.children:
            return
        if isinstance(node, Root):
            if self.roots.get(node.namespace) is node:
                del self.roots[node.namespace]
            return
        if node.users:
            return
        self._leaves.push(node)
        if len(self._leaves) > 2 * self._nodes + 64:
            self._leaves.replace(dict.fromkeys(n for s, n in self._leaves if s == n.stamp and self._is_candidate(n)))

    # ---- helpers and checks --------------------------------------------------------------------------

    def _root(self, namespace: Hashable) -> Root:
        """Return the root of a namespace: a new one, which is not in ``roots``, if the namespace is empty."""
        return self.roots.get(namespace) or Root(namespace)

    def _page(self, ids: I32, index: int) -> bytes:
        return ids[index * self.page_size : (index + 1) * self.page_size].tobytes()

    def _common(self, a: I32, b: I32) -> int:
        """Return how many whole pages at the start of ``a`` and ``b`` are equal.

        An incomplete last page does not count.
        """
        return self.common_pages(a, b, self.page_size)

    def nodes(self) -> Iterator[Node]:
        """Yield every node except the roots, parents before their children."""
        stack = [child for root in self.roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def check(self) -> None:
        """Raise AssertionError if the tree, its counts or its queue of leaves are inconsistent."""
        seen: set[int] = set()
        total = evictable = count = 0
        offered = {id(n) for s, n in self._leaves if s == n.stamp}
        for root in self.roots.values():
            assert len(root.pages) == 0 and root.parent is None, "a root has pages or a parent"
            assert root.users >= sum(c.users for c in root.children.values()), "a child has more users than its root"
        for node in self.nodes():
            count += 1
            pages = node.pages.tolist()
            assert pages and len(node.ids) == len(pages) * self.page_size, "an edge is empty or not whole pages"
            assert node.parent is not None and node.parent.children.get(self._page(node.ids, 0)) is node, (
                "the first page of a node does not lead to the node"
            )
            assert seen.isdisjoint(pages) and len(set(pages)) == len(pages), "a page is in the tree twice"
            seen.update(pages)
            assert node.users >= sum(c.users for c in node.children.values()), (
                "a node has fewer users than its children"
            )
            for page, child in node.children.items():
                assert child.parent is node and self._page(child.ids, 0) == page, "a child has a wrong parent or key"
            total += len(pages)
            if node.users == 0:
                evictable += len(pages)
                assert not node.is_leaf or id(node) in offered, (
                    "eviction can't find a leaf without users: it is not in the queue"
                )
        assert total == self.total_pages, f"the tree has {total} pages, total_pages is {self.total_pages}"
        assert evictable == self.evictable_pages, (
            f"{evictable} pages have no users, evictable_pages is {self.evictable_pages}"
        )
        assert count == self._nodes, f"the tree has {count} nodes, {self._nodes} were counted"


@hookimpl
def minisgl_configs() -> Any:
    yield "cache", "mine", Mine
