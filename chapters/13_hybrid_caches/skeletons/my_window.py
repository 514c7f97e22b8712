"""Lab window: Pages behind a window.

Grade it:  python -m minisgl.lab test window     (`hint window` for a hint)
Serve it:  python -m minisgl plugins=my_window.py cache=mine
"""

# minisgl lab window, skeleton b419c40366 (minisgl 0.2.0)

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
class Mine(GroupOptions):
    """Pages by KV group: a window's pages become free behind it, and a prefix is reused if all groups still have it."""

    def build(self, spec: EngineSpec) -> MyCache:
        self.check(spec)
        return MyCache(spec, MyManager)


def tail_pages(window: int, page_size: int) -> int:
    """Return how many pages of a prefix of whole pages the next query reads at most; `ALL` with ``window`` -1."""
    # TODO window.reads
    # 1. A query at position p reads ``window`` positions, its own included: p - window + 1, …, p.
    # 2. A page of which it reads one position counts as a whole. Its own position is not in a page of the prefix.
    raise NotImplementedError


def first_columns(positions: I32, windows: I32, page_size: int) -> I32:
    """Return the number of the first page that a query at each position reads in each group.

    ``positions`` is int32 ``[positions]``, ``windows`` is int32 ``[groups]``, and so the result is int32
    ``[positions, groups]``. A window of -1 is none: then the first page is 0.
    """
    # TODO window.reads
    # 1. Pages are counted from 0, also near the beginning of a text that is shorter than the window.
    raise NotImplementedError


class MyCache(PageTree):
    """A tree of pages whose matches are valid in all groups. ``make_manager`` makes its `CacheManager`."""

    def __init__(self, spec: EngineSpec, make_manager: type[GroupManager]):
        super().__init__(spec, make_manager, [tail_pages(group.window, spec.page_size) for group in spec.groups])

    def match(self, key: Key) -> MatchResult:
        """Return the longest prefix of ``key.ids``, in whole pages, that is valid in all groups. Change nothing.

        ``pages`` of the result is int32 ``[pages, groups]``, with ``spec.num_pages`` where a group needs no page.
        """
        # TODO window.match
        # 1. `self.roots` has the first node of a namespace, or lacks it; ``node.children`` has a node for the bytes of
        #    each next page of tokens: ``ids[first:end].tobytes()``.
        # 2. A prefix is valid if each group has all of its last ``self.needed[group]`` pages, or all pages if there are
        #    fewer. Pages are evicted one by one, so a node may lack any of them (`ABSENT`).
        # 3. The handle is a `Path` of new lists: the nodes of the prefix, the root too, and the pages that it needs.
        #    ``unlocked`` is the number of these that have no user: `self.count_unused`.
        # 4. The work grows with the pages of the prompt, times the groups, and not with their square.
        raise NotImplementedError


class MyManager(GroupManager):
    """Frees the pages behind windows."""

    def clear_behind(self, rows: I32) -> None:
        """Give up the pages that nothing after the launched step reads. ``rows`` are the rows of this step, int32."""
        # TODO window.behind
        # 1. ``table`` is described in plugins/cache/grouped/table.py. Keep what two queries read: the next one of the
        #    row, at the position ``table.num_computed_tokens[row]``, and, if the request ends now, the first one of the
        #    next turn of its conversation, at the last page border up to that position. A group without a window, and
        #    all other rows, stay as they are.
        # 2. Such a page of the request becomes a spare: `self.add_spares`. Such a page of the cache, in a column that
        #    is marked in ``table.is_cached``, is unlocked when the step's result has been read: `self.unlock_later`.
        # 3. Afterwards ``table.firsts`` is the first column that may be read, and no column before it is marked.
        raise NotImplementedError


@hookimpl
def minisgl_configs() -> Iterator[tuple[str, str, type]]:
    yield "cache", "mine", Mine
