"""Moves KV pages between the page allocator, the prefix cache and the page table, so that all three always agree.

This module knows which pages hold which tokens, and which steps were launched and read. It knows nothing of policies.

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

The methods of `CacheManager` move pages between these parts::

    admit                  free or evicted -> allocated       for the prompt without its cached prefix, which is locked
    allocate_step_pages    free or evicted -> allocated       one page for each decode row that needs it
    step_launched          computed        -> cached prefix   the cache becomes the owner, num_cached_pages grows
                           duplicate       -> retiring        if the cache already had a page with the same tokens, the
                                                              page table changes to that page first (promise 4)
    release                all parts, see below               the request ends or is retracted
    free_retired           retiring        -> free            after the last step that may touch the pages was read;
                                                              the request's lock on its cached prefix ends then, too
    _allocate              cached, no lock -> free            eviction, if too few pages are free

What `release` does with each part::

           +-----------+-----------+-----+-----------------+
           |  cached   | computed  | now |    allocated    |
           +-----------+-----------+-----+-----------------+
           | remains   | inserted  | retired               |
           | cached    | into the  |                       |
           |           | cache;    |                       |
           |           | duplicates|                       |
           |           | retired   |                       |
           +-----------+-----------+-----------------------+

The pages of a prompt are offered to the cache as soon as the step that computes them is launched. This is safe: a
request that matches these pages runs in a later step, and steps take effect in the order of their launch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from minisgl.core import I32, EngineSpec, Req, Step
from minisgl.kvcache import Key, MatchResult, PrefixCache
from minisgl.scheduler.observer import Observer
from minisgl.scheduler.page_allocator import PageAllocator
from minisgl.scheduler.request_table import RequestTable, Reserve


class AdmissionCost(NamedTuple):
    """The pages that the admission of a waiting request costs."""

    pages: int  # pages that must be free or evictable now
    growth: int  # further pages that the request's next tokens will need soon


class _PrefixMatch:
    """The last match of a request (``Req.prefix_match``). It is outdated if ``version`` is.

    ``next_page_hash`` is the hash of the tokens up to the end of page number ``next_page``: see `next_page_key`.
    """

    __slots__ = ("ids", "key", "next_page", "next_page_hash", "result", "version")

    def __init__(self, ids: I32, key: Key):
        self.ids, self.key = ids, key  # all tokens; the tokens that may be matched
        self.result: MatchResult | None = None
        self.version = self.next_page = -1
        self.next_page_hash = 0


class CacheManager:
    """The page allocator, the prefix cache and the request table of one scheduler, kept consistent with each other.

    The module docstring draws which pages of a request have which owner, and which method moves them.
    """

    def __init__(self, spec: EngineSpec, cache: PrefixCache, events: Observer):
        self.spec = spec
        self.cache = cache
        self.events = events
        self.reuses = cache.reuses and not spec.has_states  # the pages of a prefix hold no state
        self.allocator = PageAllocator(spec.num_pages, spec.max_running_requests)
        self.request_table = RequestTable(spec)
        self.reserve = Reserve(spec.max_seq_len)  # tokens of each running request for which admission keeps pages free
        self._rematch = getattr(cache, "rematch", lambda key, last: cache.match(key))
        self.last_launched_step = -1
        self.last_read_step = -1
        self.evicted_pages = 0  # number of pages evicted since the start
        self._version = 0  # changes with the cache's content and locks; an older match result is invalid
        self._pending_unlocks: deque[tuple[int, list[Any], I32]] = deque()  # (step, handles, pages), by step
        self._page_table_updates: list[tuple[I32, I32, I32]] = []  # (req_pool_indices, columns, pages)
        self._allocated: list[tuple[I32, I32]] = []  # (owners, pages), for the event of the next step

    # ---- what fits ----------------------------------------------------------------------------------

    @property
    def num_available_pages(self) -> int:
        """Number of pages that can be allocated now: free pages, and pages that the cache can evict."""
        return self.allocator.num_free + self.cache.evictable_pages

    def page_counts(self) -> tuple[int, int, int, int]:
        """Return the numbers of free, cached, evictable and retiring pages. Running requests own all others."""
        allocator, cache = self.allocator, self.cache
        return allocator.num_free, cache.total_pages, cache.evictable_pages, allocator.num_retiring

    @property
    def has_pending_frees(self) -> bool:
        """Whether pages become free or evictable when the result of a launched step is read."""
        return self.allocator.num_retiring > 0 or len(self._pending_unlocks) > 0

    def match(self, req: Req) -> MatchResult:
        """Return the cached prefix of a waiting request. The last result is reused if the cache has not changed since.

        The match never contains the request's last token: the model must compute at least one position. It contains no
        position whose logits the request needs for ``prompt_logprobs`` either.
        """
        last: _PrefixMatch | None = req.prefix_match
        if last is None:
            ids, size = req.tokens(), self.spec.page_size
            end = _num_reusable_tokens(req) // size * size if self.reuses else 0
            key = Key(req.params.cache_salt, ids[:end])
            last = req.prefix_match = _PrefixMatch(ids, key)
        if last.version != self._version or last.result is None:
            last.result = self.cache.match(last.key) if last.result is None else self._rematch(last.key, last.result)
            last.version = self._version
        return last.result

    def admission_cost(self, req: Req) -> AdmissionCost:
        """Return the pages that the admission of a waiting request needs, now and for its next tokens."""
        match, size = self.match(req), self.spec.page_size
        pages_now = -(-len(req) // size)
        pages_soon = -(-max(min(len(req) + self.reserve.num_tokens, req.max_len - 1), len(req)) // size)
        # Unlocked pages of the match are evictable now. The admission locks them, so they count as pages it needs.
        return AdmissionCost(pages_now - len(match.pages) + match.unlocked, pages_soon - pages_now)

    def next_page_key(self, req: Req, page: int) -> tuple[str | None, int] | None:
        """Return a key of the request's first ``page + 1`` pages of tokens: its ``cache_salt``, and a hash.

        None means that the request could not use page number ``page`` from the cache: `match` leaves the page out, or
        the cache reuses no pages. Requests with an equal key are about to compute the same page, so one of them waits.
        The key does not decide which KV a request reads: the prefix cache compares token ids. `match` was called for
        the request before.
        """
        end = (page + 1) * self.spec.page_size
        if not self.reuses or end > _num_reusable_tokens(req):
            return None
        last = req.prefix_match
        if last.next_page != page:  # the hash is keyed with a secret: no client can make two equal ones
            last.next_page, last.next_page_hash = page, hash(last.ids[:end].tobytes())
        return req.params.cache_salt, last.next_page_hash

    # ---- free -> allocated ---------------------------------------------------------------------------

    def admit(self, reqs: Sequence[Req], step: int) -> None:
        """Allocate a request-pool row, and pages for all tokens so far, for each request that step ``step`` admits.

        All cached prefixes are locked before the first page is allocated, so that no allocation evicts one of them.
        """
        matches = []
        for req in reqs:
            match = self.match(req)
            self.cache.lock(match.handle)
            if len(match.pages):
                self._version += 1  # the lock may have split a node: match later requests again
            matches.append(match)
            self.events.prefix_matched(req, match.pages, step)
        self.allocator.incref(np.concatenate([match.pages for match in matches]))
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
        """Allocate ``n`` pages for ``owner`` (or ``owner[i]`` each). Evict cached pages first if too few are free."""
        if n > self.allocator.num_free:
            self._evict(n - self.allocator.num_free)
        pages = self.allocator.allocate(n, owner)
        if n:
            self._allocated.append((np.broadcast_to(np.asarray(owner, np.int32), n), pages))
        return pages

    def _evict(self, n: int) -> int:
        evicted = self.cache.evict(n)
        self.allocator.free_evicted(evicted)
        self._version += 1
        self.evicted_pages += len(evicted)
        self.events.pages_evicted(self.last_launched_step + 1, evicted)
        return len(evicted)

    def flush(self) -> int:
        """Evict all cached pages that no request uses. Return their number."""
        return self._evict(self.cache.evictable_pages) if self.cache.evictable_pages else 0

    def stats(self) -> dict[str, int]:
        """Return the number of pages in each state, and of those evicted since the start, for `Scheduler.stats`."""
        names = ("num_free_pages", "num_cached_pages", "num_evictable_pages", "num_retiring_pages")
        counts = dict(zip(names, self.page_counts(), strict=True))
        return {"evicted_pages": self.evicted_pages, "num_pages": self.spec.num_pages, **counts}

    def check_idle(self) -> None:
        """Raise AssertionError unless the KV pool is whole, and no request owns a page or row (promise 9)."""
        self.allocator.check_idle(self.cache.total_pages)

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

    # ---- computed -> cached, and retired -> free -------------------------------------------------------

    def step_launched(self, step: Step, reqs: Sequence[Req]) -> None:
        """Offer to the cache the whole pages of prompts that ``step`` computes, in the prefill chunks of ``reqs``."""
        self.last_launched_step = step.id
        if not self.reuses or not reqs:
            return
        table, rows = self.request_table, [req.req_pool_idx for req in reqs]
        computed = np.minimum(table.num_computed_tokens[rows], table.num_prefill_tokens[rows])
        end_pages = (computed // self.spec.page_size).tolist()
        self._insert([(req, req.prefix_match.ids, end) for req, end in zip(reqs, end_pages, strict=True)])

    def _insert(self, offers: Sequence[tuple[Req, I32, int]]) -> None:
        """Offer the pages ``[num_cached_pages, end_page)`` of each (request, token ids, end_page) to the cache.

        The request's table then names the cached pages, and its duplicates of them are retired.
        """
        inserted: list[tuple[Req, int, I32, I32]] = []  # (request, its first page, its offer, the cache's pages)
        page_table, size = self.request_table.page_table, self.spec.page_size
        for req, ids, end_page in offers:
            start = req.num_cached_pages
            if end_page <= start:
                continue
            offered = page_table[req.req_pool_idx, start:end_page]
            key = Key(req.params.cache_salt, ids[: end_page * size])
            handle, cached = self.cache.insert(req.cache_handle, key, start, offered)
            if len(cached) == 0:
                continue
            self.cache.lock(handle)
            self.cache.unlock(req.cache_handle)
            req.cache_handle, req.num_cached_pages = handle, start + len(cached)
            inserted.append((req, start, offered[: len(cached)].copy(), cached))
        self._version += 1
        if inserted:
            self._transfer_to_cache(inserted)

    def _transfer_to_cache(self, inserted: Sequence[tuple[Req, int, I32, I32]]) -> None:
        """Make the cache the owner of the offered pages that it took, and retire the other ones, which are duplicates.

        ``inserted`` contains (request, number of its first offered page, offered pages, the cache's pages for them).
        """
        offered, cached = (np.concatenate([each[i] for each in inserted]) for i in (2, 3))
        owners = np.repeat([req.uid for req, *_ in inserted], [len(each[3]) for each in inserted])
        new = offered == cached
        self.allocator.transfer_to_cache(offered[new], owners[new])
        self.allocator.incref(cached)
        for req, start, mine, its in inserted:
            self.events.pages_cached(self.last_launched_step, req, mine[mine == its], start, its)
        if not new.all():
            for req, start, mine, its in inserted:
                self._replace_duplicates(req, start, mine, its)

    def _replace_duplicates(self, req: Req, start: int, offered: I32, cached: I32) -> None:
        """Change the page table of ``req`` from page ``start`` on from the offered to the cached pages.

        Only then retire the pages that the page table no longer names (promise 4).
        """
        different = np.flatnonzero(offered != cached)
        if len(different):
            row, columns, pages = req.req_pool_idx, (start + different).astype(np.int32), cached[different]
            self.request_table.page_table[row, columns] = pages
            self._page_table_updates.append((np.full(len(columns), row, np.int32), columns, pages))
            self._retire([(req.uid, offered[different])])

    def release(self, reqs: Sequence[Req]) -> None:
        """Retire the request-pool rows and the pages of requests that have ended or are retracted.

        Full pages of computed tokens go to the cache. The rows and the other pages become free, and the cached prefixes
        become unlocked, once the result of the last launched step has been read.
        """
        table = self.request_table
        rows = np.array([req.req_pool_idx for req in reqs], np.int32)
        if self.reuses:
            # num_computed_tokens may be ahead of the tokens that the scheduler knows: a launched step computes a
            # token's KV before the scheduler has read that token.
            known = np.minimum(table.num_computed_tokens[rows], [len(req) for req in reqs])
            end_pages = (known // self.spec.page_size).tolist()
            self._insert(
                [
                    (req, req.tokens(), end)
                    for req, end in zip(reqs, end_pages, strict=True)
                    if end > req.num_cached_pages
                ]
            )
        # Drop updates of these rows that no step has carried yet: they may name pages that are retired below.
        keeps = np.ones(self.spec.max_running_requests, bool)  # whether a row keeps its updates
        keeps[rows] = False
        self._page_table_updates = [
            (updated_rows[keep], columns[keep], updated[keep])
            for updated_rows, columns, updated in self._page_table_updates
            if (keep := keeps[updated_rows]).any()
        ]
        pages = [table.pages_of(req) for req in reqs]
        cached = np.concatenate([its[: req.num_cached_pages] for req, its in zip(reqs, pages, strict=True)])
        self._pending_unlocks.append((self.last_launched_step, [req.cache_handle for req in reqs], cached))
        self._retire([(req.uid, its[req.num_cached_pages :]) for req, its in zip(reqs, pages, strict=True)], rows)
        table.remove(reqs)
        for req in reqs:
            req.req_pool_idx = req.admission_order = -1
            req.num_cached_pages = 0
            req.cache_handle = req.prefix_match = None
        self.free_retired(self.last_read_step)

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
        """Free the pages and unlock the prefixes that waited for the result of ``step``, which has now been read."""
        self.last_read_step = step
        self.allocator.free_retired(step)
        while self._pending_unlocks and self._pending_unlocks[0][0] <= step:
            _, handles, pages = self._pending_unlocks.popleft()
            self.allocator.decref(pages)
            for handle in handles:
                self.cache.unlock(handle)
            self._version += 1


def _num_reusable_tokens(req: Req) -> int:
    """Return how many leading tokens of a request the prefix cache may serve.

    The model must compute at least the last one, and the positions whose logits ``prompt_logprobs`` still needs.
    """
    end = len(req) - 1
    return min(end, req.next_prompt_logprob) if req.next_prompt_logprob < len(req.prompt_ids) - 1 else end


_NONE = np.empty(0, np.int32)
