"""The `CacheManager` of `cache=groups`: pages of several KV groups. Groups with a window free the pages behind it.

What differs from `PrefixCacheManager`:

- A group without a window gets the pages of a whole prompt at admission. A group with a window gets them chunk by
  chunk. Until then the request has a *promise*: free or evictable pages that no other request gets. So a prompt that
  was admitted never waits for pages (promise 5).
- When a step is launched, the columns that no later query reads are cleared. What a next turn of the conversation
  reads, which begins at the last page border, stays. A page of the cache becomes unlocked when the result of the step
  has been read. A page of the request becomes its *spare*, which is the next one that the request fills: steps take
  effect in their order, so no result has to be read first. Spares that it can't fill soon are retired.
- Pages that hold the same KV as a page of the cache are not replaced by it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from minisgl.core import I32, EngineSpec, Req, Step
from minisgl.plugins.cache.base import MatchResult
from minisgl.plugins.cache.grouped.table import GroupTable
from minisgl.plugins.cache.grouped.tree import ABSENT, PageTree, Path
from minisgl.plugins.cache.prefix import PrefixCacheManager
from minisgl.scheduler.cache_manager import AdmissionCost
from minisgl.scheduler.observer import Observer

_NONE = np.empty(0, np.int32)
_ALL = 2**31 - 1


class GroupManager(PrefixCacheManager, ABC):
    """The pages of several KV groups. Observers are told of no single page: their events know one group."""

    cache: PageTree
    request_table: GroupTable

    def __init__(self, spec: EngineSpec, cache: PageTree, events: Observer):
        super().__init__(spec, cache, Observer())
        self.request_table = GroupTable(spec)

    # ---- what fits ----------------------------------------------------------------------------------

    @property
    def num_available_pages(self) -> int:
        """Free or evictable pages that are promised to no request."""
        return super().num_available_pages - int(self.request_table.num_promised_pages.sum())

    def match(self, req: Req) -> MatchResult:
        """Return the cached prefix of a waiting request; none if the request fits into the pool only without it."""
        match = super().match(req)
        if self._cost(req, match) > self.spec.num_pages:
            return self.cache.match(req.prefix_match.key._replace(ids=_NONE))
        return match

    def _cost(self, req: Req, match: MatchResult) -> int:
        """Return the pages that the admission takes: new ones, promised ones, and evictable ones that it locks."""
        new = -(-len(req) // self.spec.page_size) - len(match.pages)
        return self.spec.pages_of(new) + match.unlocked

    def admission_cost(self, req: Req) -> AdmissionCost:
        """Return the pages that the admission of a waiting request needs, now and for its next tokens."""
        soon = max(min(len(req) + self.reserve.num_tokens, req.max_len - 1), len(req))
        pages = (np.array([-(-n // self.spec.page_size)], np.int32) for n in (len(req), soon))
        return AdmissionCost(self._cost(req, self.match(req)), int(self.request_table.growth(*pages)[0]))

    # ---- free -> allocated ---------------------------------------------------------------------------

    def admit(self, reqs: Sequence[Req], step: int) -> None:
        """Allocate rows, and pages for all tokens so far in the groups without a window; promise the others."""
        table, size = self.request_table, self.spec.page_size
        matches = [self.match(req) for req in reqs]
        for match in matches:
            self.cache.lock(match.handle)
            self.allocator.incref(np.array(match.handle.pages, np.int32))
        self._version += 1
        uids = np.array([req.uid for req in reqs], np.int32)
        rows = self.allocator.req_pool.allocate(len(uids), uids)
        for req, match, row in zip(reqs, matches, rows.tolist(), strict=True):
            req.cache_handle, req.num_cached_pages, req.req_pool_idx = match.handle, 0, row
        num_cached_tokens = np.array([len(match.pages) * size for match in matches], np.int32)
        table.admit(reqs, _NONE, np.zeros(len(reqs), np.int32), num_cached_tokens, step - 1)
        table.clear(rows)
        for req, match, row in zip(reqs, matches, rows.tolist(), strict=True):
            end = len(match.pages)
            for group, needed in enumerate(self.cache.needed):
                first = max(end - needed, 0)
                table.firsts[row, group] = table.ends[row, group] = first
                self._fill(row, group, match.pages[first:, group])
                table.is_cached[row, group, first:end] = True
                table.firsts[row, group], table.ends[row, group] = first, end
                if table.windows[group] < 0:
                    self._extend(row, group, -(-len(req) // size))
            self._promise(row)

    def allocate_step_pages(self, req_pool_indices: I32, num_tokens: I32) -> None:
        """Allocate the pages that the rows of the next step write and lack. ``num_tokens`` are those of each row."""
        table = self.request_table
        ends = -(-(table.num_computed_tokens[req_pool_indices] + num_tokens) // self.spec.page_size)
        for i, group in np.argwhere(ends[:, None] > table.ends[req_pool_indices]).tolist():
            self._extend(int(req_pool_indices[i]), group, int(ends[i]))
            self._promise(int(req_pool_indices[i]))

    def _extend(self, row: int, group: int, end: int) -> None:
        """Allocate pages for the columns of the group before ``end`` that have none: spares first, then new ones."""
        table = self.request_table
        spares, count = table.spares[row][group], end - int(table.ends[row, group])
        pages = [spares.pop() for _ in range(min(len(spares), count))]
        table.num_spares[row, group] = len(spares)
        new = self._allocate(count - len(pages), int(table.uid[row]))
        self._fill(row, group, np.concatenate((np.array(pages, np.int32), new)))

    def _fill(self, row: int, group: int, pages: I32) -> None:
        """Write the pages into the next columns of the group."""
        table, first = self.request_table, int(self.request_table.ends[row, group])
        columns = np.arange(first, first + len(pages), dtype=np.int32)
        table.tables[row, group, columns] = pages
        table.ends[row, group] += len(pages)
        if len(pages):
            where = np.full(len(pages), row, np.int32), columns + np.int32(group * self.spec.num_columns)
            self._page_table_updates.append((*where, np.asarray(pages, np.int32).copy()))

    def _promise(self, row: int) -> None:
        """Promise the request in the row the pages that the rest of its prompt may still take."""
        table, promised = self.request_table, 0
        if table.num_computed_tokens[row] < table.num_prefill_tokens[row]:
            pages = -(-int(table.num_prefill_tokens[row]) // self.spec.page_size)
            for number, group in enumerate(self.spec.groups):
                first, end = int(table.firsts[row, number]), int(table.ends[row, number])
                own = end - first - int(np.count_nonzero(table.is_cached[row, number, first:end]))
                spare = int(table.num_spares[row, number])
                promised += max(min(group.max_pages - own - spare, pages - end - spare), 0)
        table.num_promised_pages[row] = promised

    # ---- computed -> cached, behind the window -> spare or unlocked, retired -> free -----------------------

    def step_launched(self, step: Step, reqs: Sequence[Req]) -> None:
        """Offer whole pages of prompts to the cache, and clear the columns that no later query reads."""
        self.last_launched_step = step.id
        table = self.request_table
        reserved = int(table.page_growth(self.reserve.num_tokens).sum())
        for req in reqs:
            row = req.req_pool_idx
            computed = min(int(table.num_computed_tokens[row]), int(table.num_prefill_tokens[row]))
            left = max(self.num_available_pages - reserved, 0)
            self._offer(req, req.prefix_match.ids, computed // self.spec.page_size, left)
            self._promise(row)  # so the next request of the step does not offer the same pages
        self.clear_behind(step.req_pool_indices)
        for req in reqs:
            self._promise(req.req_pool_idx)

    def _offer(self, req: Req, ids: I32, end: int, most: int = _ALL) -> None:
        """Give the cache the request's pages before column ``end`` that it lacks; of windows, at most ``most`` pages.

        A running request may need another page in place of one of a window, which it can't fill again once it is the
        cache's. ``most`` are the pages that are left for this.
        """
        table, row, path = self.request_table, req.req_pool_idx, req.cache_handle
        self.cache.extend(path, ids[: end * self.spec.page_size])
        given: list[int] = []
        for group, window in enumerate(table.windows.tolist()):
            first = int(table.firsts[row, group])
            for column in (first + np.flatnonzero(~table.is_cached[row, group, first:end])).tolist():
                node = path.nodes[column + 1]
                if node.pages[group] != ABSENT or (window >= 0 and most == 0):
                    continue
                most -= window >= 0
                given.append(int(table.tables[row, group, column]))
                self.cache.add(node, group, given[-1])
                table.is_cached[row, group, column] = True
        if given:
            pages = np.array(given, np.int32)
            self.allocator.transfer_to_cache(pages, req.uid)
            self.allocator.incref(pages)
            self._version += 1

    @abstractmethod
    def clear_behind(self, rows: I32) -> None:
        """Clear the columns of windows that nothing after the launched step reads. ``rows`` are those of the step."""

    def unlock_later(self, pages: Sequence[int]) -> None:
        """Unlock pages of the cache when the result of the launched step has been read: until then it reads them."""
        if pages:
            unlocked = [Path([], list(pages))]
            self._pending_unlocks.append((self.last_launched_step, unlocked, np.array(pages, np.int32)))

    def add_spares(self, row: int, group: int, pages: Sequence[int]) -> None:
        """Keep pages of the request as its spares. Retire those that it can't fill.

        It fills those of the rest of its prompt, or the next one. ``table.ends`` must be right.
        """
        table = self.request_table
        spares = table.spares[row][group]
        spares += pages
        left = -(-int(table.num_prefill_tokens[row]) // self.spec.page_size) - int(table.ends[row, group])
        retired = spares[max(left, 1) :]
        del spares[max(left, 1) :]
        table.num_spares[row, group] = len(spares)
        if retired:
            self._retire([(int(table.uid[row]), np.array(retired, np.int32))])

    def _insert(self, offers: Sequence[tuple[Req, I32, int]]) -> None:
        """Give the cache what `release` offers: (request, token ids, end_page) each."""
        for req, ids, end in offers:
            self._offer(req, ids, end)
            req.cache_handle.pages = self.request_table.cached_pages_of(req.req_pool_idx)
            req.num_cached_pages = len(req.cache_handle.pages)

    def release(self, reqs: Sequence[Req]) -> None:
        """Retire the rows and pages of requests that have ended or are retracted; their whole pages go to the cache."""
        rows = np.array([req.req_pool_idx for req in reqs], np.int32)
        for req in reqs:
            req.cache_handle.pages = []  # `_insert` finds those that the request still has
        super().release(reqs)
        self.request_table.clear(rows)
