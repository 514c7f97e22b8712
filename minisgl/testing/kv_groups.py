"""Checks of KV groups: no running request keeps pages behind its window, and none has lost a page of its window.

A request reads its window, and a next turn may read the window before the last page border. Both are kept.

`SimEngine` checks that each row reads exactly its window. It sees no owners. So it finds a page that was freed too
early only when another request has written it, and a page that is kept too long not at all. `WindowDrive` asks the page
allocator, and knows nothing of the plugin's records but the page table.
"""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np

from minisgl.core import I32, KVGroup, Output, Req, SamplingParams
from minisgl.scheduler.page_allocator import CACHE
from minisgl.testing.drive import Drive, Job

__all__ = ["WindowDrive", "group", "random_groups"]


def group(window: int, page_size: int, chunk: int) -> KVGroup:
    """Return the group of layers with a window, for chunks of at most ``chunk`` tokens. ``window`` -1: no window."""
    return KVGroup() if window < 0 else KVGroup(window, -(-(window - 1) // page_size) - (-chunk // page_size) + 1)


def random_groups(random: Random, page_size: int, chunk: int) -> tuple[KVGroup, ...]:
    """Return groups with and without windows, from one to four."""
    windows = random.choice([(-1, 5), (-1, 1, 5), (9,), (-1, 9, 9, 9), (2, 30), (-1, 16), (-1,), (-1, -1, 7), (48, -1)])
    return tuple(group(window, page_size, chunk) for window in windows)


class WindowDrive(Drive):
    """A `Drive` of a scheduler whose cache is `cache=groups`, which checks the pages of all running requests."""

    def step(self) -> Output:
        output = super().step()
        if self.thorough:
            self.check_pages()
        return output

    def check_pages(self) -> None:
        """Raise AssertionError if a running request has too many pages, or if its next query lacks a page."""
        manager: Any = self.scheduler.cache_manager
        owner, users = manager.allocator.owner, manager.allocator.ref_counts
        table, spec, locked = manager.request_table, self.spec, 0
        for req in table.reqs:
            row, limit = req.req_pool_idx, 0
            computed = int(table.num_computed_tokens[row])
            is_prefill = computed < table.num_prefill_tokens[row]
            held = 0
            for number, kv_group in enumerate(spec.groups):
                pages = self._read_pages(row, computed, number, kv_group.window)
                own, cached = owner[pages] == req.uid, (owner[pages] == CACHE) & (users[pages] > 0)
                assert (own | cached).all(), (
                    f"page {pages[~(own | cached)][0]} of KV group {number}, which the next row or the next turn of "
                    f"request {req.uid} reads, was freed too early"
                )
                assert len(np.unique(pages)) == len(pages), f"a page is twice in the window of request {req.uid}"
                held += int(cached.sum())
                limit += self._most_pages(req, computed, is_prefill, kv_group)
            locked += held
            own_pages = int(np.count_nonzero(owner == req.uid))
            assert own_pages + held <= limit, (
                f"request {req.uid} keeps {own_pages} pages and {held} of the cache at position {computed}; at most "
                f"{limit} are in its windows"
            )
        if self.engine.unread == 0:
            assert int(users.sum()) == locked, (
                f"the cache's pages have {int(users.sum())} users; all requests read {locked} of them"
            )

    def _read_pages(self, row: int, computed: int, number: int, window: int) -> I32:
        """Return the pages of a group that hold what queries at position ``computed`` or at the last border read."""
        size, first = self.spec.page_size, number * self.spec.num_columns
        border = next(at for at in range(computed, -1, -1) if at % size == 0)
        begin = 0 if window < 0 else max(border - window + 1, 0) // size
        table = self.scheduler.request_table.page_table
        pages: I32 = table[row, first + begin : first - (-computed // size)]
        return pages

    def _most_pages(self, req: Req, computed: int, is_prefill: bool, kv_group: KVGroup) -> int:
        """Return the most pages that a request may have in a group: those of the window, and one more to fill next."""
        pages = -(-max(computed, len(req)) // self.spec.page_size)
        if kv_group.window < 0:
            return pages
        return min(pages, kv_group.max_pages if is_prefill else -(-kv_group.window // self.spec.page_size) + 2)

    def check_idle(self) -> None:
        """Check also that the cache can evict all its pages: no lock outlives its request."""
        super().check_idle()
        locked = self.cache.total_pages - self.cache.evictable_pages
        assert locked == 0, f"the scheduler is idle, but {locked} pages of the cache are locked"

    def check_whole_pool(self) -> None:
        """Check that the longest request that the pool can hold runs alone."""
        tokens = self.spec.max_tokens_per_request
        if tokens < 2:
            return
        uid = max(self.requests, default=0) + 1
        self.run([Job(uid, [1] * (tokens - 1), SamplingParams(max_tokens=1, temperature=0.0))])
        assert self.report.finished[uid].output_tokens == 1
