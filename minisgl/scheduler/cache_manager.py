"""Moves KV pages between the page allocator and the page table, so that both always agree.

`CacheManager` reuses no KV: every request computes its whole prompt in pages of its own. `PrefixCacheManager` in
`plugins/cache/prefix.py` adds the prefix cache: it locks cached pages at admission, and gives the cache the pages that
are computed. The drawing shows both. Neither knows anything of policies.

The page-table row of a running request, with the owner of each page. In this example a page holds 4 tokens, the prompt
has 30 tokens, and a step that computes the positions up to 18 has just been launched; `step_launched` comes next::

    page      0     1     2     3     4     5     6     7     8     9
           +-----------+-----------+-----+-----------------+ - - - - - -
           |  cached   | computed  | now |    allocated    |  not yet
           |  prefix   |           |     |  not computed   |  allocated
           +-----------+-----------+-----+-----------------+ - - - - - -
    token  0           8           16  ^ 20                32
                       |               |                   |
       num_cached_pages = 2            |            num_pages = 8: at admission, pages for the whole prompt;
                                       |            while the request decodes, one page at a time
                      num_computed_tokens = 19

    part            owner        state
    cached prefix   the cache    [0, num_cached_pages): locked by `Req.cache_handle`, one user more in `ref_counts`
    computed        the request  full pages; `step_launched` offers them to the cache
    now             the request  the page that is being written
    allocated       the request  pages for the rest of the prompt

The methods of a manager move pages between these parts; * marks what the prefix cache adds::

    admit                  free            -> allocated       for the prompt, * without its cached prefix: it is locked
    allocate_step_pages    free            -> allocated       one page for each decode row that needs it
    step_launched        * computed        -> cached prefix   the cache becomes the owner, num_cached_pages grows
                         * duplicate       -> retiring        if the cache already had a page with the same tokens, the
                                                              page table changes to that page first (promise 4)
    release                all parts, see below               the request ends or is retracted
    free_retired           retiring        -> free            after the last step that may touch the pages was read;
                                                            * the request's lock on its cached prefix ends then, too
    _allocate            * cached, no lock -> free            eviction, if too few pages are free

What `release` does with each part; without a prefix cache, all parts are retired::

           +-----------+-----------+-----+-----------------+
           |  cached   | computed  | now |    allocated    |
           +-----------+-----------+-----+-----------------+
           | remains   | inserted  | retired               |
           | cached    | into the  |                       |
           |           | cache;    |                       |
           |           | duplicates|                       |
           |           | retired   |                       |
           +-----------+-----------+-----------------------+
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from minisgl.core import I32, EngineSpec, Req, Step
from minisgl.scheduler.base import Waiting
from minisgl.scheduler.observer import Observer
from minisgl.scheduler.page_allocator import PageAllocator
from minisgl.scheduler.request_table import RequestTable, Reserve


class MatchResult(NamedTuple):
    """The longest cached prefix of a key, in whole pages."""

    handle: Any  # the cache's own reference to the prefix, for `lock`, `unlock` and `insert`
    pages: I32  # [pages] pages of the prefix, in order; the caller does not write to the array
    unlocked: int  # how many of these pages have no lock; locking the handle makes them not evictable


class AdmissionCost(NamedTuple):
    """The pages that the admission of a waiting request costs."""

    pages: int  # pages that must be free or evictable now
    growth: int  # further pages that the request's next tokens will need soon


class CacheManager:
    """The page allocator and the request table of one scheduler, kept consistent with each other.

    The module docstring draws which pages of a request have which owner, and which method moves them. Requests share no
    pages here.
    """

    make_allocator = PageAllocator

    def __init__(self, spec: EngineSpec, events: Observer):
        self.spec = spec
        self.events = events
        self.allocator = self.make_allocator(spec.num_pages, spec.max_running_requests)
        self.request_table = RequestTable(spec)
        self.reserve = Reserve(spec.max_seq_len)  # tokens of each running request for which admission keeps pages free
        self.last_launched_step = -1
        self.evicted_pages = 0  # number of pages evicted since the start
        self._page_table_updates: list[tuple[I32, I32, I32]] = []  # (req_pool_indices, columns, pages)
        self._allocated: list[tuple[I32, I32]] = []  # (owners, pages), for the event of the next step

    # ---- what fits ----------------------------------------------------------------------------------

    @property
    def num_available_pages(self) -> int:
        """Number of pages that can be allocated now: free pages, and pages that a cache can evict."""
        return self.allocator.num_free

    def page_counts(self) -> tuple[int, int, int, int]:
        """Return the numbers of free, cached, evictable and retiring pages. Running requests own all others."""
        return self.allocator.num_free, 0, 0, self.allocator.num_retiring

    @property
    def has_pending_frees(self) -> bool:
        """Whether pages become free or evictable when the result of a launched step is read."""
        return self.allocator.num_retiring > 0

    def match(self, req: Req) -> MatchResult:
        """Return the cached prefix of a waiting request: here, none."""
        return NO_PREFIX

    def waiting_views(self, waiting: Iterable[Req], prefilling: Iterable[Req], step: int) -> Iterator[Waiting]:
        """Yield the policy's view of each request in ``waiting``, which is in order of arrival, for step ``step``.

        ``prefilling`` are the running requests that compute their prompt. With a prefix cache, one of them or a request
        yielded before may be the ``same_prefix_req`` of a request.
        """
        for req in waiting:
            yield Waiting(req.uid, req.arrival, len(req), 0, None, step - req.queued_at_step, req.priority)

    def admission_cost(self, req: Req) -> AdmissionCost:
        """Return the pages that the admission of a waiting request needs, now and for its next tokens."""
        match, size = self.match(req), self.spec.page_size
        pages_now = -(-len(req) // size)
        pages_soon = -(-max(min(len(req) + self.reserve.num_tokens, req.max_len - 1), len(req)) // size)
        # Unlocked pages of the match are evictable now. The admission locks them, so they count as pages it needs.
        return AdmissionCost(pages_now - len(match.pages) + match.unlocked, pages_soon - pages_now)

    # ---- free -> allocated ---------------------------------------------------------------------------

    def admit(self, reqs: Sequence[Req], step: int) -> None:
        """Allocate a request-pool row, and pages for all tokens so far, for each request that step ``step`` admits."""
        matches = self.lock_prefixes(reqs, step)
        uids = np.array([req.uid for req in reqs], np.int32)
        num_cached_pages = np.array([len(match.pages) for match in matches], np.int32)
        num_pages = -(-np.array([len(req) for req in reqs], np.int32) // self.spec.page_size)
        num_new_pages = num_pages - num_cached_pages
        new_pages = self._allocate(int(num_new_pages.sum()), np.repeat(uids, num_new_pages))
        rows = self.allocator.req_pool.allocate(len(uids), uids)
        pages = new_pages
        if num_cached_pages.any():
            ends = np.cumsum(num_new_pages).tolist()
            parts: list[I32] = []
            for match, end, n in zip(matches, ends, num_new_pages.tolist(), strict=True):
                parts += (match.pages, new_pages[end - n : end])
            pages = np.concatenate(parts)
        for req, match, row in zip(reqs, matches, rows.tolist(), strict=True):
            req.cache_handle, req.num_cached_pages, req.req_pool_idx = match.handle, len(match.pages), row
        num_cached_tokens = num_cached_pages * self.spec.page_size
        self._page_table_updates.append(self.request_table.admit(reqs, pages, num_pages, num_cached_tokens, step - 1))

    def lock_prefixes(self, reqs: Sequence[Req], step: int) -> list[MatchResult]:
        """Return the cached prefix of each request, which is locked from now on, until `release`: here, none."""
        for req in reqs:
            self.events.prefix_matched(req, _NONE, step)
        return [NO_PREFIX for _ in reqs]

    def allocate_step_pages(self, req_pool_indices: I32, num_tokens: I32) -> None:
        """Allocate one more page for each row whose next token starts a new page: for each such decode row."""
        rows = req_pool_indices[self.request_table.new_pages(req_pool_indices) > 0]
        if len(rows):
            self.add_pages(rows, self.request_table.num_pages[rows])

    def add_pages(self, req_pool_indices: I32, columns: I32) -> None:
        """Allocate a page for each entry (row, column) of the page table: the next columns of each row, in order."""
        table = self.request_table
        pages = self._allocate(len(columns), table.uid[req_pool_indices])
        table.page_table[req_pool_indices, columns] = pages
        np.add.at(table.num_pages, req_pool_indices, 1)
        self._page_table_updates.append((req_pool_indices, columns, pages))

    def _allocate(self, n: int, owner: int | I32) -> I32:
        """Allocate ``n`` pages for ``owner`` (or ``owner[i]`` each)."""
        pages = self.allocator.allocate(n, owner)
        if n:
            self._allocated.append((np.broadcast_to(np.asarray(owner, np.int32), n), pages))
        return pages

    def stats(self) -> dict[str, int]:
        """Return the number of pages in each state, and of those evicted since the start, for `Scheduler.stats`."""
        names = ("num_free_pages", "num_cached_pages", "num_evictable_pages", "num_retiring_pages")
        counts = dict(zip(names, self.page_counts(), strict=True))
        return {"evicted_pages": self.evicted_pages, "num_pages": self.spec.num_pages, **counts}

    def check_idle(self) -> None:
        """Raise AssertionError unless the KV pool is whole, and no request owns a page or row (promise 9)."""
        self.allocator.check_idle(self.page_counts()[1])

    def pop_page_table_updates(self) -> tuple[I32, I32, I32]:
        """Return the page-table entries that changed since the last call, oldest first, and forget them.

        The arrays are (req_pool_idx, column, page), each int32 ``[updates]``.
        """
        updates, self._page_table_updates = self._page_table_updates, []
        allocated, self._allocated = self._allocated, []
        if allocated:
            owners, pages = (np.concatenate(parts) for parts in zip(*allocated, strict=True))
            self.events.pages_allocated(self.last_launched_step + 1, owners, pages)
        if not updates:
            return _NONE.copy(), _NONE.copy(), _NONE.copy()
        req_pool_indices, columns, pages = (np.concatenate(parts) for parts in zip(*updates, strict=True))
        return req_pool_indices, columns, pages

    # ---- allocated -> retiring -> free -------------------------------------------------------------------

    def step_launched(self, step: Step, reqs: Sequence[Req]) -> None:
        """Note that ``step`` was launched. ``reqs`` are the requests of its prefill chunks."""
        self.last_launched_step = step.id

    def release(self, reqs: Sequence[Req]) -> None:
        """Retire the request-pool rows and the pages of requests that have ended or are retracted.

        They become free once the result of the last launched step has been read. The first ``num_cached_pages`` pages
        of a request are not its own.
        """
        table = self.request_table
        rows = np.array([req.req_pool_idx for req in reqs], np.int32)
        # Drop updates of these rows that no step has carried yet: they may name pages that are retired below.
        keeps = np.ones(self.spec.max_running_requests, bool)  # whether a row keeps its updates
        keeps[rows] = False
        self._page_table_updates = [
            (updated_rows[keep], columns[keep], updated[keep])
            for updated_rows, columns, updated in self._page_table_updates
            if (keep := keeps[updated_rows]).any()
        ]
        self._retire([(req.uid, table.pages_of(req)[req.num_cached_pages :]) for req in reqs], rows)
        table.remove(reqs)
        for req in reqs:
            req.req_pool_idx = req.admission_order = -1

    def _retire(self, owned: Sequence[tuple[int, I32]], req_pool_indices: I32 | None = None) -> None:
        """Retire the pages of each (uid, pages), and the request-pool row of each uid if rows are given."""
        # The events come first, so that an observer sees the pages even if the allocator raises an error.
        for uid, pages in owned:
            self.events.pages_freed(self.last_launched_step, uid, pages)
        uids = np.array([uid for uid, _ in owned], np.int32)
        owners = np.repeat(uids, [len(pages) for _, pages in owned])
        self.allocator.retire(np.concatenate([pages for _, pages in owned]), owners, self.last_launched_step)
        if req_pool_indices is not None:
            self.allocator.req_pool.retire(req_pool_indices, uids, self.last_launched_step)

    def free_retired(self, step: int) -> None:
        """Free the pages and rows that waited for the result of ``step``, which has now been read."""
        self.allocator.free_retired(step)


_NONE = np.empty(0, np.int32)
NO_PREFIX = MatchResult(None, _NONE, 0)
"""The match of a request that reuses no page."""
