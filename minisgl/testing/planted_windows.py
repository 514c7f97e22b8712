"""Bugs of KV groups, as patches of `cache=groups`, each with a small workload that reveals the bug: see `planted`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np

from minisgl.core import I32, EngineSpec, Req
from minisgl.plugins.cache import groups
from minisgl.plugins.cache.base import Key, MatchResult
from minisgl.plugins.cache.grouped.table import GroupTable
from minisgl.plugins.cache.grouped.tree import Path
from minisgl.plugins.cache.groups import GroupCacheManager, GroupedCache
from minisgl.testing.drive import Job, make_plugin
from minisgl.testing.kv_groups import WindowDrive, group
from minisgl.testing.planted import ArrivalOrderPolicy, job

__all__ = ["PLANTED_WINDOWS", "PlantedWindow"]

Bug = AbstractContextManager[Any]
CHUNK = 8


@dataclass(frozen=True)
class PlantedWindow:
    """A bug, and a workload that reveals it: the fields are those of `minisgl.testing.planted.Planted`.

    ``windows`` are those of the KV groups; -1: no window.
    """

    plant: Callable[[], Bug]
    clients: Sequence[Job]
    num_pages: int
    oracle: str
    windows: Sequence[int] = (-1, 6)

    def run(self) -> WindowDrive:
        """Run the workload. With the bug, raise the error that reports it."""
        groups = tuple(group(window, 4, CHUNK) for window in self.windows)
        spec = EngineSpec(
            page_size=4,
            num_pages=self.num_pages,
            max_running_requests=4,
            max_seq_len=64,
            vocab_size=50,
            groups=groups,
        )
        cache = make_plugin("cache", "groups", spec=spec)
        drive = WindowDrive(spec, cache, ArrivalOrderPolicy(), max_prefill_tokens=CHUNK)
        drive.run(self.clients)
        return drive


def _windows_moved(tokens: int) -> Bug:
    """Patch the manager: it clears the columns of queries that are this number of positions later."""
    real = GroupCacheManager.clear_behind

    def clear(self: GroupCacheManager, rows: I32) -> None:
        right = self.request_table.windows.copy()
        self.request_table.windows[right >= 0] -= tokens
        real(self, rows)
        self.request_table.windows[:] = right

    return patch.object(GroupCacheManager, "clear_behind", clear)


def page_freed_early() -> Bug:
    """Patch the manager: pages become free one page of tokens before the window has left them."""
    return _windows_moved(4)


def window_one_too_short() -> Bug:
    """Patch the manager: the query's own position does not count as one of the window's."""
    return _windows_moved(1)


def page_kept_late() -> Bug:
    """Patch the manager: pages become free two pages of tokens after the window has left them."""
    return _windows_moved(-8)


def border_forgotten() -> Bug:
    """Patch the manager: it frees what the last query of a page does not read, but one at its border does."""
    real = groups.first_columns

    def first(positions: I32, windows: I32, page_size: int) -> I32:
        return real(positions + np.int32(page_size - 1), windows, page_size)

    return patch.object(groups, "first_columns", first)


def never_freed() -> Bug:
    """Patch the manager: windows are masked only, and keep their pages."""
    return patch.object(GroupCacheManager, "clear_behind", lambda self, rows: None)


def unlocked_in_flight() -> Bug:
    """Patch the manager: cached pages behind a window are evictable at once, although a step reads them."""
    real = GroupCacheManager.clear_behind

    def clear(self: GroupCacheManager, rows: I32) -> None:
        before = len(self._pending_unlocks)
        real(self, rows)
        while len(self._pending_unlocks) > before:
            _, paths, pages = self._pending_unlocks.pop()
            self.allocator.decref(pages)
            for path in paths:
                self.cache.unlock(path)

    return patch.object(GroupCacheManager, "clear_behind", clear)


def never_unlocked() -> Bug:
    """Patch the manager: cached pages behind a window stay locked."""
    real = GroupCacheManager.clear_behind

    def clear(self: GroupCacheManager, rows: I32) -> None:
        before = len(self._pending_unlocks)
        real(self, rows)
        while len(self._pending_unlocks) > before:
            self._pending_unlocks.pop()

    return patch.object(GroupCacheManager, "clear_behind", clear)


@contextmanager
def _needed(change: Callable[[int], int]) -> Any:
    real = GroupedCache.__init__

    def init(self: GroupedCache, spec: EngineSpec, make_manager: Any) -> None:
        real(self, spec, make_manager)
        self.needed = [n if n > 1000 else change(n) for n in self.needed]

    with patch.object(GroupedCache, "__init__", init):
        yield


def hit_without_window() -> Bug:
    """Patch the cache: a prefix counts as valid if the groups without a window have it."""
    return _needed(lambda pages: 0)


def hit_one_page_short() -> Bug:
    """Patch the cache: of a window, it needs one page too few."""
    return _needed(lambda pages: pages - 1)


def groups_mixed_up() -> Bug:
    """Patch the manager: the engine writes the pages of all groups into the columns of the first."""
    real = GroupCacheManager._fill

    def fill(self: GroupCacheManager, row: int, group: int, pages: I32) -> None:
        before = len(self._page_table_updates)
        real(self, row, group, pages)
        for i in range(before, len(self._page_table_updates)):
            rows, columns, filled = self._page_table_updates[i]
            self._page_table_updates[i] = rows, columns - np.int32(group * self.spec.num_columns), filled

    return patch.object(GroupCacheManager, "_fill", fill)


def groups_exchanged_at_hit() -> Bug:
    """Patch the cache: the pages of the last two groups are exchanged in a match."""
    real = GroupedCache.match

    def match(self: GroupedCache, key: Key) -> MatchResult:
        right = real(self, key)
        pages: I32 = right.pages[:, [*range(right.pages.shape[1] - 2), -1, -2]]
        return MatchResult(right.handle, pages, right.unlocked)

    return patch.object(GroupedCache, "match", match)


def no_promise() -> Bug:
    """Patch the manager: pages for the later chunks of a prompt are not kept for it."""
    return patch.object(GroupCacheManager, "_promise", lambda self, row: None)


def cached_without_room() -> Bug:
    """Patch the manager: window pages go to the cache, although there is no page left to take their place."""
    real = GroupCacheManager._offer
    return patch.object(GroupCacheManager, "_offer", lambda self, req, ids, end, most=0: real(self, req, ids, end))


def spares_lost() -> Bug:
    """Patch the table: the spares of a request that ends are not retired."""
    real = GroupTable.own_pages_of

    def own(self: GroupTable, row: int) -> list[int]:
        spares, self.spares[row] = self.spares[row], [[] for _ in self.windows]
        pages: list[int] = real(self, row)
        self.spares[row] = spares
        return pages

    return patch.object(GroupTable, "own_pages_of", own)


def cached_page_as_spare() -> Bug:
    """Patch the manager: a page behind the window is filled again, although it is the cache's."""
    real = GroupCacheManager.clear_behind

    def clear(self: GroupCacheManager, rows: I32) -> None:
        table = self.request_table
        right = table.is_cached.copy()
        table.is_cached[:, table.windows >= 0] = False
        real(self, rows)
        table.is_cached[:] = right

    return patch.object(GroupCacheManager, "clear_behind", clear)


def end_keeps_locks() -> Bug:
    """Patch the manager: the pages of the cache that a request has at its end stay locked."""
    real = GroupCacheManager._insert

    def insert(self: GroupCacheManager, offers: Sequence[tuple[Req, I32, int]]) -> None:
        real(self, offers)
        for req, _, _ in offers:
            req.cache_handle = Path(req.cache_handle.nodes, [])

    return patch.object(GroupCacheManager, "_insert", insert)


def spare_reused_too_soon() -> Bug:
    """Patch the manager: the pages that a chunk has just filled become spares with the others behind its window."""
    real = GroupCacheManager.clear_behind

    def clear(self: GroupCacheManager, rows: I32) -> None:
        real(self, rows)
        table = self.request_table
        for row in rows.tolist():
            for number in np.flatnonzero(table.windows >= 0).tolist():
                first, end = int(table.firsts[row, number]), int(table.ends[row, number])
                if end - first > 1 and not table.is_cached[row, number, first] and not table.spares[row][number]:
                    table.spares[row][number].append(int(table.tables[row, number, first]))
                    table.num_spares[row, number] = 1

    return patch.object(GroupCacheManager, "clear_behind", clear)


LONG = [job(1, 30, 20), job(2, 25, 20, first=9), job(3, 34, 12, first=17, arrive=2), job(4, 9, 30, first=25, arrive=3)]
SHARED = [
    job(1, 34, 20),
    job(2, 22, 12, arrive=14),
    job(3, 37, 9, arrive=19),
    job(4, 30, 16, first=17, arrive=24),
    job(5, 13, 16, arrive=40),
    job(6, 35, 16, arrive=42),
]
CROWDED = [job(uid, 24 + uid, 10, first=9 * uid, arrive=uid) for uid in range(1, 9)]

PLANTED_WINDOWS: dict[str, PlantedWindow] = {
    "a window freed one page early": PlantedWindow(page_freed_early, LONG, 60, "freed too early"),
    "a window one position too short": PlantedWindow(window_one_too_short, LONG, 60, "freed too early"),
    "a window freed at the end of each page": PlantedWindow(border_forgotten, LONG, 60, "freed too early"),
    "a window freed two pages late": PlantedWindow(page_kept_late, LONG, 60, "keeps"),
    "a window that is masked only": PlantedWindow(never_freed, LONG, 60, "keeps"),
    "cached pages unlocked while a step reads them": PlantedWindow(unlocked_in_flight, CROWDED, 31, "page-in-flight"),
    "cached pages behind a window that stay locked": PlantedWindow(never_unlocked, LONG, 60, "users"),
    "a hit without the window's pages": PlantedWindow(hit_without_window, SHARED, 30, "freed too early"),
    "a hit with one page of the window too few": PlantedWindow(hit_one_page_short, SHARED, 30, "freed too early"),
    "pages in the columns of another group": PlantedWindow(groups_mixed_up, LONG, 60, "table-missing"),
    "a hit with the pages of another group": PlantedWindow(
        groups_exchanged_at_hit, SHARED, 90, "kv-content", windows=(-1, 6, 6)
    ),
    "no promise for later chunks": PlantedWindow(no_promise, CROWDED, 24, "pages requested"),
    "window pages cached without room for others": PlantedWindow(
        cached_without_room, CROWDED, 15, "cannot hold the only running request", (6, 6, 6)
    ),
    "spares that are never retired": PlantedWindow(spares_lost, LONG, 60, "lost"),
    "a page of the cache that is filled again": PlantedWindow(
        cached_page_as_spare, LONG, 60, "cannot transfer to the cache page"
    ),
    "locks that outlive the request": PlantedWindow(end_keeps_locks, SHARED, 60, "are locked"),
    "a page of the window that is filled again": PlantedWindow(spare_reused_too_soon, LONG, 60, "twice in the window"),
}
"""Description of each bug → the bug and its workload."""


@contextmanager
def planted_window(*bugs: Callable[[], Bug]) -> Any:
    """Give `cache=groups` the bugs while the context is open."""
    with ExitStack() as stack:
        for bug in bugs:
            stack.enter_context(bug())
        yield
