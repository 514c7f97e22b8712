"""`cache=groups`: layers with a sliding window have pages of their own, which become free behind the window.

Here is what depends on the window: which pages a query reads, where a cached prefix can be used, and which pages become
free. The tree and the other moves of pages are in `plugins/cache/grouped`. See docs/design/kv-groups.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from minisgl.core import I32, EngineSpec
from minisgl.hooks import hookimpl
from minisgl.plugins.cache.base import Key, MatchResult
from minisgl.plugins.cache.grouped.manager import GroupManager
from minisgl.plugins.cache.grouped.options import GroupOptions
from minisgl.plugins.cache.grouped.tree import ABSENT, Node, PageTree, Path

ALL = 2**31 - 1
"""As a number of pages: every page, however long the prefix is."""


@dataclass
class Groups(GroupOptions):
    """Pages by KV group: a window's pages become free behind it, and a prefix is reused if all groups still have it."""

    def build(self, spec: EngineSpec) -> GroupedCache:
        self.check(spec)
        return GroupedCache(spec, GroupCacheManager)


# lab: window.reads
def tail_pages(window: int, page_size: int) -> int:
    """Return how many pages of a prefix of whole pages the next query reads at most; `ALL` with ``window`` -1."""
    # 1. A query at position p reads ``window`` positions, its own included: p - window + 1, …, p.
    # 2. A page of which it reads one position counts as a whole. Its own position is not in a page of the prefix.
    return ALL if window < 0 else -(-(window - 1) // page_size)


def first_columns(positions: I32, windows: I32, page_size: int) -> I32:
    """Return the number of the first page that a query at each position reads in each group.

    ``positions`` is int32 ``[positions]``, ``windows`` is int32 ``[groups]``, and so the result is int32
    ``[positions, groups]``. A window of -1 is none: then the first page is 0.
    """
    # 1. Pages are counted from 0, also near the beginning of a text that is shorter than the window.
    first: I32 = np.maximum(positions[:, None] - windows + 1, 0) // page_size
    return np.where(windows < 0, 0, first).astype(np.int32)


# lab: end


class GroupedCache(PageTree):
    """A tree of pages whose matches are valid in all groups. ``make_manager`` makes its `CacheManager`."""

    def __init__(self, spec: EngineSpec, make_manager: type[GroupManager]):
        super().__init__(spec, make_manager, [tail_pages(group.window, spec.page_size) for group in spec.groups])

    # lab: window.match
    def match(self, key: Key) -> MatchResult:
        """Return the longest prefix of ``key.ids``, in whole pages, that is valid in all groups. Change nothing.

        ``pages`` of the result is int32 ``[pages, groups]``, with ``spec.num_pages`` where a group needs no page.
        """
        # 1. `self.roots` has the first node of a namespace, or lacks it; ``node.children`` has a node for the bytes of
        #    each next page of tokens: ``ids[first:end].tobytes()``.
        # 2. A prefix is valid if each group has all of its last ``self.needed[group]`` pages, or all pages if there are
        #    fewer. Pages are evicted one by one, so a node may lack any of them (`ABSENT`).
        # 3. The handle is a `Path` of new lists: the nodes of the prefix, the root too, and the pages that it needs.
        #    ``unlocked`` is the number of these that have no user: `self.count_unused`.
        # 4. The work grows with the pages of the prompt, times the groups, and not with their square.
        size, groups = self.spec.page_size, range(len(self.needed))
        nodes = [self.roots.get(key.namespace) or Node(None, key.namespace, len(self.needed))]
        longest, runs = 0, [0 for _ in groups]  # runs: pages of each group, without a gap up to here
        for at in range(len(key.ids) // size):
            child = nodes[-1].children.get(key.ids[at * size : (at + 1) * size].tobytes())
            if child is None:
                break
            nodes.append(child)
            runs = [run + 1 if page != ABSENT else 0 for run, page in zip(runs, child.pages, strict=True)]
            if all(run >= min(at + 1, needed) for run, needed in zip(runs, self.needed, strict=True)):
                longest = at + 1
        pages = np.full((longest, len(self.needed)), self.spec.num_pages, np.int32)
        used: list[int] = []
        for at in range(longest):
            for group in groups:
                if at >= longest - self.needed[group]:
                    pages[at, group] = nodes[at + 1].pages[group]
                    used.append(nodes[at + 1].pages[group])
        return MatchResult(Path(nodes[: longest + 1], used), pages, self.count_unused(used))

    # lab: end


class GroupCacheManager(GroupManager):
    """Frees the pages behind windows."""

    # lab: window.behind
    def clear_behind(self, rows: I32) -> None:
        """Give up the pages that nothing after the launched step reads. ``rows`` are the rows of this step, int32."""
        # 1. ``table`` is described in plugins/cache/grouped/table.py. Keep what two queries read: the next one of the
        #    row, at the position ``table.num_computed_tokens[row]``, and, if the request ends now, the first one of the
        #    next turn of its conversation, at the last page border up to that position. A group without a window, and
        #    all other rows, stay as they are.
        # 2. Such a page of the request becomes a spare: `self.add_spares`. Such a page of the cache, in a column that
        #    is marked in ``table.is_cached``, is unlocked when the step's result has been read: `self.unlock_later`.
        # 3. Afterwards ``table.firsts`` is the first column that may be read, and no column before it is marked.
        table = self.request_table
        borders = table.num_computed_tokens[rows] // self.spec.page_size * self.spec.page_size
        firsts = first_columns(borders, table.windows, self.spec.page_size)
        unlocked: list[int] = []
        for i, group in np.argwhere(firsts > table.firsts[rows]).tolist():
            row, first = int(rows[i]), int(firsts[i, group])
            columns = slice(int(table.firsts[row, group]), first)
            pages, is_cached = table.tables[row, group, columns], table.is_cached[row, group, columns]
            unlocked += pages[is_cached].tolist()
            self.add_spares(row, group, pages[~is_cached].tolist())
            is_cached[:] = False
            table.firsts[row, group] = first
        self.unlock_later(unlocked)

    # lab: end


@hookimpl
def minisgl_configs() -> Iterator[tuple[str, str, type]]:
    yield "cache", "groups", Groups
