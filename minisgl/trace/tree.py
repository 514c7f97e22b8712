"""The radix tree of pages, as the events of a cache tell of it: who grew, split, used and evicted what, and when.

It makes the same moves as `cache=radix` without its tokens, so its nodes, users and ages are that cache's, exactly.
For another cache it is the tree of what that cache holds, cut where requests part.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

__all__ = ["Node", "PageTree"]


class Node:
    """An edge and its lower end. ``stamp`` is when it was last used, on the tree's clock; ``step`` in which step."""

    __slots__ = ("children", "pages", "parent", "stamp", "step", "users")

    def __init__(self, parent: Node | None, pages: list[int]):
        self.parent, self.pages = parent, pages
        self.children: list[Node] = []
        self.users = self.stamp = self.step = 0

    @property
    def depth(self) -> int:
        """Pages above it."""
        return 0 if self.parent is None else self.parent.depth + len(self.parent.pages)


class PageTree:
    """Nodes by page. A prefix is named by its last page; None is the empty one."""

    def __init__(self) -> None:
        self.root = Node(None, [])
        self.where: dict[int, Node] = {}
        self.splits = 0
        self._clock = 0

    def path(self, page: int | None) -> list[int]:
        """The pages of a prefix."""
        node = self._node(page)
        out = node.pages[: node.pages.index(page) + 1] if page is not None and node.pages else []
        while node.parent is not None:
            node = node.parent
            out = node.pages + out
        return out

    def lock(self, page: int | None, step: int, users: int = 1) -> None:
        """One user more (or fewer) on the path to ``page``, which then ends a node."""
        self._clock += 1
        node: Node | None = self._end_at(page)
        while node is not None:
            node.users += users
            node.stamp, node.step = self._clock, step
            node = node.parent

    def insert(self, below: int | None, pages: Sequence[int], step: int) -> None:
        """The cache took over ``pages``, which go on where the prefix ``below`` ends."""
        parent = self._end_at(below)
        node = Node(parent, list(pages))
        self._clock += 1
        node.stamp, node.step = self._clock, step
        parent.children.append(node)
        self.where.update(dict.fromkeys(pages, node))

    def evict(self, pages: Sequence[int]) -> None:
        """The cache gave up ``pages``."""
        touched = {self.where.pop(page) for page in pages if page in self.where}
        gone = set(pages)
        for node in touched:
            node.pages = [page for page in node.pages if page not in gone]
            if not node.pages and node.parent is not None and node in node.parent.children:
                node.parent.children.remove(node)

    def nodes(self) -> Iterator[Node]:
        """Every node but the root, each right before its children, older children first."""
        stack = list(reversed(self.root.children))
        while stack:
            node = stack.pop()
            yield node
            stack.extend(reversed(node.children))

    def _node(self, page: int | None) -> Node:
        return self.root if page is None else self.where.get(page, self.root)

    def _end_at(self, page: int | None) -> Node:
        """The node that ends with ``page``: split off, where one goes on."""
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
        self.where.update(dict.fromkeys(upper.pages, upper))
        self.splits += 1
        return upper
