"""The radix tree of cached pages, reconstructed from the events of a prefix cache.

`PageTree` performs the same operations as `cache=radix`, but on pages instead of tokens. So its nodes, users and ages
equal those of that cache exactly. For another cache, it is the tree of the cached prefixes, split where they diverge.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

__all__ = ["Node", "PageTree"]


class Node:
    """A node with the pages of the edge from its parent, in order.

    ``users`` counts the locks on this node or below it. ``stamp`` is the time of the last use on the tree's clock,
    which counts operations; ``step`` is the step of the last use.
    """

    __slots__ = ("children", "pages", "parent", "stamp", "step", "users")

    def __init__(self, parent: Node | None, pages: list[int]):
        self.parent, self.pages = parent, pages
        self.children: list[Node] = []
        self.users = self.stamp = self.step = 0

    @property
    def depth(self) -> int:
        """Number of pages between the root and this node's own pages."""
        return 0 if self.parent is None else self.parent.depth + len(self.parent.pages)


class PageTree:
    """The tree. A prefix is identified by its last page, and the empty prefix by None."""

    def __init__(self) -> None:
        self.root = Node(None, [])
        self.node_of: dict[int, Node] = {}  # cached page -> its node
        self.splits = 0
        self._clock = 0

    @classmethod
    def of(cls, nodes: Iterable[tuple[int, list[int], int, int]]) -> PageTree:
        """Return the tree of `minisgl.trace.events.Now`."""
        tree, made = cls(), list[Node]()
        for parent, pages, users, step in nodes:
            node = Node(tree.root if parent < 0 else made[parent], list(pages))
            assert node.parent is not None
            node.parent.children.append(node)
            node.users, node.step = users, step
            made.append(node)
            tree.node_of.update(dict.fromkeys(pages, node))
        for stamp, node in enumerate(sorted(made, key=lambda node: node.step), 1):
            node.stamp = tree._clock = stamp
        return tree

    def path(self, page: int | None) -> list[int]:
        """Return the pages of the prefix that ends with ``page``, in order."""
        node = self._node(page)
        out = node.pages[: node.pages.index(page) + 1] if page is not None and node.pages else []
        while node.parent is not None:
            node = node.parent
            out = node.pages + out
        return out

    def lock(self, page: int | None, step: int, users: int = 1) -> None:
        """Add ``users`` (1 or -1) to every node of the prefix that ends with ``page``. May split the last node."""
        self._clock += 1
        node: Node | None = self._end_at(page)
        while node is not None:
            node.users += users
            node.stamp, node.step = self._clock, step
            node = node.parent

    def insert(self, prefix: int | None, pages: Sequence[int], step: int) -> None:
        """Insert a node with ``pages`` below the end of ``prefix``."""
        parent = self._end_at(prefix)
        node = Node(parent, list(pages))
        self._clock += 1
        node.stamp, node.step = self._clock, step
        parent.children.append(node)
        self.node_of.update(dict.fromkeys(pages, node))

    def evict(self, pages: Sequence[int]) -> None:
        """Remove evicted pages, and the nodes that become empty."""
        touched = {self.node_of.pop(page) for page in pages if page in self.node_of}
        evicted = set(pages)
        for node in touched:
            node.pages = [page for page in node.pages if page not in evicted]
            if not node.pages and node.parent is not None and node in node.parent.children:
                node.parent.children.remove(node)

    def nodes(self) -> Iterator[Node]:
        """Yield every node but the root, in depth-first order: a node before its children, older children first."""
        stack = list(reversed(self.root.children))
        while stack:
            node = stack.pop()
            yield node
            stack.extend(reversed(node.children))

    def _node(self, page: int | None) -> Node:
        return self.root if page is None else self.node_of.get(page, self.root)

    def _end_at(self, page: int | None) -> Node:
        """Return the node whose last page is ``page``; split the node that contains the page if necessary."""
        node = self._node(page)
        at = node.pages.index(page) + 1 if page is not None and node.pages else 0
        if at == len(node.pages):
            return node
        assert node.parent is not None
        upper = Node(node.parent, node.pages[:at])
        upper.users, upper.stamp, upper.step = node.users, node.stamp, node.step
        node.parent.children[node.parent.children.index(node)] = upper
        upper.children.append(node)
        node.pages, node.parent = node.pages[at:], upper
        self.node_of.update(dict.fromkeys(upper.pages, upper))
        self.splits += 1
        return upper
