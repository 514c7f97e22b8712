"""`cache=radix`: a radix tree of token prefixes, shared by requests with equal prefixes, with LRU eviction.

RadixAttention, arXiv:2312.07104. An edge holds whole pages of tokens. The prefix of a node is the path from the root to
the node. A lock counts one user on every node of its path. So a node without users has only nodes without users below
it, and its whole subtree can be evicted, leaves first. The cache knows tokens and page numbers. The owner of each page
is recorded in the scheduler's `PageAllocator`.
"""

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
class Radix:
    """A radix tree of prefixes: requests with an equal prefix share its KV pages. Eviction is least recently used."""

    # lab: omit
    compare: str = "auto"
    """Implementation of the comparison of token ids: ``numpy``, or ``cpp``, which is compiled at the first start on a
    machine and needs ``minisgl[cpp]`` and a C++ compiler. ``auto`` is ``cpp`` if available, else ``numpy``."""
    # lab: end

    def build(self, page_size: int) -> RadixCache:
        cache = RadixCache(page_size)
        # lab: omit
        cache.common_pages = compare.pick_common_pages(self.compare)
        # lab: end
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


class RadixCache:
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

    # lab: radix.match
    def match(self, key: Key) -> MatchResult:
        """Return the longest cached prefix of ``key``, in whole pages. No side effect."""
        # 1. Walk down from the root. The next page of tokens leads to at most one child.
        node: Node = self._root(key.namespace)
        used = unlocked = 0
        found: list[I32] = []
        at, end = 0, len(key.ids) // self.page_size
        while at < end:
            child = node.children.get(self._page(key.ids, at))
            if child is None:
                break
            # 2. The key may differ from the edge within the edge. Count the equal whole pages, and stop there.
            node, used = child, self._common(child.ids, key.ids[at * self.page_size :])
            found.append(child.pages[:used])
            unlocked += used if child.users == 0 else 0
            at += used
            if used < len(child.pages):
                break
        # 3. A match changes neither the tree nor the order of eviction.
        return MatchResult(Handle(node, used), np.concatenate(found) if found else _NONE, unlocked)

    # lab: end

    # lab: omit
    def rematch(self, key: Key, last: MatchResult) -> MatchResult:
        """Return what ``match(key)`` returns. Compare only tokens after ``last``, an earlier result for the same key.

        The tokens of a path never change while its last node is in the tree. But its last edge may have been split, or
        the edge's last pages may have been evicted.
        """
        node, size = last.handle.node, len(last.pages)
        if node.parent is None or node.parent.children.get(self._page(node.ids, 0)) is not node:
            return self.match(key)  # nothing was found, or the node was evicted
        path = [node]
        while path[-1].parent is not None:
            path.append(path[-1].parent)
        start = sum([len(above.pages) for above in path]) - len(node.pages)  # pages of the path above `node`
        i = 0
        while start >= size:  # the edge was split: the prefix ends in a part above
            i += 1
            start -= len(path[i].pages)
        node = path[i]
        used = min(size - start, len(node.pages))  # fewer than before if pages were evicted
        pages = last.pages[: start + used]
        unlocked = used if node.users == 0 else 0
        for above in path[i + 1 :]:
            if above.users == 0:
                unlocked += len(above.pages)
        at, end = start + used, len(key.ids) // self.page_size
        found = [pages]
        while used == len(node.pages) and at < end:
            child = node.children.get(self._page(key.ids, at))
            if child is None:
                break
            node, used = child, self._common(child.ids, key.ids[at * self.page_size :])
            found.append(child.pages[:used])
            unlocked += used if child.users == 0 else 0
            at += used
        return MatchResult(Handle(node, used), np.concatenate(found) if len(found) > 1 else pages, unlocked)

    # lab: end

    # lab: radix.lock
    def lock(self, handle: Handle) -> None:
        """Count one user on every node of the prefix, the root included. A node with users is never evicted.

        The same ``handle`` is later passed to `insert` and `unlock`.
        """
        # 1. If the prefix ends inside an edge, split the edge there first. Set the handle's node to the upper part. A
        #    handle may be locked again after another lock has split its edge: then `used` counts pages above it, too.
        #    A handle with the 5 pages of an edge of 5 keeps used=5 when the edge becomes 2 + 3: its node has 3 pages.
        if handle.used < len(handle.node.pages):
            handle.node = self._split(handle.node, handle.used)
        # 2. Count the user on every ancestor too. The pages of a node with its first user are no longer evictable. A
        #    path may have more nodes than Python's recursion limit.
        self._clock += 1
        node: Node | None = handle.node
        while node is not None:
            if node.users == 0:
                self.evictable_pages -= len(node.pages)
            node.users += 1
            node.stamp = self._clock
            node = node.parent

    def unlock(self, handle: Handle) -> None:
        """Remove one user from every node of the prefix. A node without users can be evicted, leaves first."""
        # 3. The prefix was in use until now, so its time of last use is now.
        self._clock += 1
        node: Node | None = handle.node
        while node is not None:
            assert node.users > 0, "unlock without lock"
            node.users -= 1
            node.stamp = self._clock
            if node.users == 0:
                self.evictable_pages += len(node.pages)
                self._offer(node)
            node = node.parent

    # lab: end

    # ---- insert ----------------------------------------------------------------------------------

    # lab: radix.split
    def _split(self, node: Node, at: int) -> Node:
        """Split the edge of ``node`` after ``at`` pages. Return the new upper node."""
        # 1. `node` becomes the lower part, so that existing handles to `node` keep their whole prefix.
        assert node.parent is not None
        cut = at * self.page_size
        upper = Node(node.parent, node.ids[:cut], node.pages[:at])
        node.parent.children[self._page(node.ids, 0)] = upper
        node.ids, node.pages, node.parent = node.ids[cut:], node.pages[at:], upper
        upper.children[self._page(node.ids, 0)] = node
        # 2. Every user of the lower part also uses the upper part. Both parts have the same time of last use.
        upper.users, upper.stamp = node.users, node.stamp
        self._nodes += 1
        return upper

    # lab: end

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

    # lab: radix.evict
    def evict(self, pages: int) -> I32:
        """Evict and return ``pages`` pages without users, or all if there are fewer: least recently used first.

        Pages are evicted from the ends of paths. The order of the returned pages is free.
        """
        evicted: list[I32] = []
        missing = pages
        while missing > 0 and (oldest := self._leaves.pop()) is not None:
            # 1. Take the oldest leaf without users. Skip an entry if its node was since used, extended or removed.
            stamp, node = oldest
            if stamp != node.stamp or not self._is_candidate(node):
                continue
            # 2. Evict no more pages than needed (the gates allow four more), from the end of the edge: every match
            #    begins at the front of a prefix.
            keep = max(len(node.pages) - missing, 0)
            evicted.append(node.pages[keep:])
            missing -= len(evicted[-1])
            if keep:
                node.ids, node.pages = node.ids[: keep * self.page_size], node.pages[:keep]
                self._offer(node)
                continue
            # 3. A parent without any child left is a leaf now, and can be evicted next.
            parent = node.parent
            assert parent is not None
            del parent.children[self._page(node.ids, 0)]
            node.parent = None
            self._nodes -= 1
            self._offer(parent)
        result = np.concatenate(evicted) if evicted else _NONE
        self.total_pages -= len(result)
        self.evictable_pages -= len(result)
        return result

    # lab: end

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
    yield "cache", "radix", Radix
