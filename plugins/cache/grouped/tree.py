"""The tree of `cache=groups`: a node for each page of tokens, which has a page of each KV group.

A node lacks the page of a group if it was evicted, or if a request kept it. A prefix can be used if each group has all
that its layers read: a group without a window has all pages of the prefix, and a group with a window of n positions has
the pages with the last n - 1 of them. Pages are evicted one by one, least recently used first, the last pages of a
prefix before its first.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import numpy as np

from minisgl.core import I32, EngineSpec
from minisgl.plugins.cache.base import InsertResult, Key, MatchResult

ABSENT = -1
"""Takes the place of a page that a node does not have."""


class Node:
    """The page of tokens ``tokens`` after the prefix of ``parent``. ``pages[g]`` holds its KV in group g, or `ABSENT`.

    ``held`` is the number of running requests whose path ends here. A node without pages, children and such requests is
    removed.
    """

    __slots__ = ("children", "held", "pages", "parent", "tokens")

    def __init__(self, parent: Node | None, tokens: Hashable, groups: int):
        self.parent, self.tokens = parent, tokens
        self.pages = [ABSENT] * groups
        self.children: dict[Hashable, Node] = {}
        self.held = 0


class Path:
    """A prefix: its nodes from the root on. `lock` adds a user to each of ``pages``."""

    __slots__ = ("nodes", "pages")

    def __init__(self, nodes: list[Node], pages: list[int]):
        self.nodes, self.pages = nodes, pages


class PageTree(ABC):
    """A `PrefixCache` whose matches have an array of pages int32 ``[pages, groups]``.

    Where a group needs no page of a matched prefix, the array has ``spec.num_pages``, the scratch page.

    - ``make_manager`` makes the `CacheManager` that knows this array.
    - ``needed`` has for each group the number of pages at the end of a prefix that the layers of the group read.
    - ``roots``: the first node of each namespace. It has no tokens and no pages.
    - ``owners``: the node and the group of each page of the cache.
    - ``unused``: the pages without users, as keys, in the order in which they lost their last user.
    """

    reuses = True

    def __init__(self, spec: EngineSpec, make_manager: Callable[..., Any], needed: Sequence[int]):
        self.spec, self.make_manager, self.needed = spec, make_manager, list(needed)
        self.roots: dict[Hashable, Node] = {}
        self.owners: dict[int, tuple[Node, int]] = {}  # each page of the cache: its node and group
        self._users: dict[int, int] = {}  # each page with users: their number
        self.unused: dict[int, None] = {}  # pages without users, the next to be evicted first

    @property
    def evictable_pages(self) -> int:
        return len(self.unused)

    @property
    def total_pages(self) -> int:
        return len(self.owners)

    @abstractmethod
    def match(self, key: Key) -> MatchResult:
        """Return the longest prefix of ``key.ids`` that is valid in all groups, and change nothing."""

    def lock(self, handle: Path) -> None:
        """Keep the pages of the path from eviction until `unlock`, and its nodes in the tree."""
        if handle.nodes:
            root = handle.nodes[0]
            handle.nodes[0] = self.roots.setdefault(root.tokens, root)
            handle.nodes[-1].held += 1
        self._count_users(handle.pages)

    def count_unused(self, pages: Iterable[int]) -> int:
        """Return how many of these pages of the cache have no user."""
        return sum(page in self.unused for page in pages)

    def _count_users(self, pages: Iterable[int]) -> None:
        for page in pages:
            self._users[page] = self._users.get(page, 0) + 1
            self.unused.pop(page, None)

    def unlock(self, handle: Path) -> None:
        """Remove one user from each of the pages. The last page is the first to be evicted."""
        for page in reversed(handle.pages):
            self._users[page] -= 1
            if not self._users[page]:
                del self._users[page]
                self.unused[page] = None
        if handle.nodes:
            handle.nodes[-1].held -= 1
            self.prune(handle.nodes[-1])

    def extend(self, path: Path, ids: I32) -> None:
        """Lengthen the locked path by the pages that it lacks of the prefix ``ids``."""
        size, before = self.spec.page_size, path.nodes[-1]
        for at in range(len(path.nodes) - 1, len(ids) // size):
            node, tokens = path.nodes[-1], ids[at * size : (at + 1) * size].tobytes()
            if tokens not in node.children:
                node.children[tokens] = Node(node, tokens, len(self.needed))
            path.nodes.append(node.children[tokens])
        before.held -= 1
        path.nodes[-1].held += 1

    def add(self, node: Node, group: int, page: int) -> None:
        """Make the cache the owner of a page, with one user."""
        assert node.pages[group] == ABSENT
        node.pages[group] = page
        self.owners[page] = node, group
        self._users[page] = 1

    def insert(self, base: Path | None, key: Key, start: int, pages: I32) -> InsertResult:
        """Not called: the manager adds pages one by one."""
        raise NotImplementedError("cache=groups takes pages through its own manager")

    def evict(self, pages: int) -> I32:
        """Remove ``pages`` pages without users, or all if there are fewer, and return them."""
        evicted = [page for page, _ in zip(self.unused, range(pages), strict=False)]
        for page in evicted:
            del self.unused[page]
            node, group = self.owners.pop(page)
            node.pages[group] = ABSENT
            self.prune(node)
        return np.array(evicted, np.int32)

    def prune(self, node: Node) -> None:
        """Remove the node if nothing needs it, and then its parent."""
        while not node.held and not node.children and all(page == ABSENT for page in node.pages):
            if node.parent is None:
                if self.roots.get(node.tokens) is node:
                    del self.roots[node.tokens]
                return
            if node.parent.children.get(node.tokens) is node:
                del node.parent.children[node.tokens]
            node = node.parent

    def check(self) -> None:
        """Raise AssertionError if the tree and the records of its pages differ, or if it has a node without a use."""
        found: dict[int, tuple[Node, int]] = {}
        nodes = list(self.roots.values())
        while nodes:
            node = nodes.pop()
            nodes += node.children.values()
            here = {page: (node, group) for group, page in enumerate(node.pages) if page != ABSENT}
            assert here or node.children or node.held, "the tree has a node without a use"
            assert not here.keys() & found.keys(), "a page has two nodes"
            found |= here
        assert found == self.owners, "the pages of the nodes are not those of the cache"
        assert self.unused.keys() | self._users.keys() == found.keys(), "a page neither has users nor can be evicted"
        assert not self.unused.keys() & self._users.keys(), "a page with users can be evicted"


__all__ = ["ABSENT", "Node", "PageTree", "Path"]
