"""The prefix cache's part of moving pages: requests read the cached pages of their prefix, and leave theirs behind.

The drawing in `minisgl.scheduler.cache_manager` shows which pages of a request the cache owns. `PrefixCacheManager` is
the manager of every cache that holds pages, unless the cache makes another (``make_manager``). It decides when the
cache is asked and told, and keeps the records of owners right. Without this file, no KV is reused, whatever the cache.

The pages of a prompt are offered to the cache as soon as the step that computes them is launched. This is safe: a
request that matches these pages runs in a later step, and steps take effect in the order of their launch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from minisgl.core import I32, EngineSpec, Req, Step
from minisgl.hooks import hookimpl
from minisgl.plugins.cache.base import Key, MatchResult, PrefixCache
from minisgl.scheduler.base import Waiting
from minisgl.scheduler.cache_manager import CacheManager
from minisgl.scheduler.observer import Observer
from minisgl.scheduler.page_allocator import CACHE, PageAllocator, PageOwnershipError


class SharedPageAllocator(PageAllocator):
    """A `PageAllocator` whose pages the prefix cache may own, for several requests.

    ``ref_counts[page]`` is the number of running requests that use a page of the cache, int32 ``[num_pages]``.
    """

    def __init__(self, num_pages: int, max_running_requests: int):
        super().__init__(num_pages, max_running_requests)
        self.ref_counts: I32 = np.zeros(num_pages, np.int32)

    def transfer_to_cache(self, pages: I32, owner: int | I32) -> None:
        """Make the prefix cache the owner of pages of request ``owner``, or of page i of request ``owner[i]``.

        Their user count starts at 0.
        """
        self.check_owner(pages, owner, "transfer to the cache")
        self.owner[pages] = CACHE

    def incref(self, pages: I32) -> None:
        """Count one more user of these pages of the cache; a page that is listed twice gets two users."""
        self.check_owner(pages, CACHE, "add a user to")
        np.add.at(self.ref_counts, pages, 1)

    def decref(self, pages: I32) -> None:
        """Count one user fewer of these pages of the cache; a page that is listed twice loses two users."""
        self.check_owner(pages, CACHE, "remove a user from")
        np.subtract.at(self.ref_counts, pages, 1)
        negative = self.ref_counts[pages] < 0
        if np.count_nonzero(negative):
            raise PageOwnershipError(f"cannot remove a user from pages {pages[negative].tolist()}: they have no users")

    def free_evicted(self, pages: I32) -> None:
        """Free evicted pages of the cache immediately: they have no users, so no unread step touches them."""
        self.check_owner(pages, CACHE, "evict")
        if len(pages) and int(self.ref_counts[pages].max()) > 0:
            used = pages[self.ref_counts[pages] > 0].tolist()
            raise PageOwnershipError(f"cannot evict pages {used}: they are in use")
        self.free(pages)

    def check_idle(self, total_cached: int) -> None:
        """Raise `PageOwnershipError` unless all is as in a `PageAllocator`, and no page has a user."""
        super().check_idle(total_cached)
        if self.ref_counts.any():
            raise PageOwnershipError(f"idle, but pages {np.flatnonzero(self.ref_counts).tolist()} have users")


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


class PrefixCacheManager(CacheManager):
    """A `CacheManager` that also keeps the prefix cache consistent with the page allocator and the page table."""

    make_allocator = SharedPageAllocator
    allocator: SharedPageAllocator

    def __init__(self, spec: EngineSpec, cache: PrefixCache, events: Observer):
        super().__init__(spec, events)
        self.cache = cache
        self._rematch = getattr(cache, "rematch", lambda key, last: cache.match(key))
        self._version = 0  # changes with the cache's content and locks; an older match result is invalid
        self._pending_unlocks: deque[tuple[int, list[Any], I32]] = deque()  # (step, handles, pages), by step

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
        return super().has_pending_frees or len(self._pending_unlocks) > 0

    def match(self, req: Req) -> MatchResult:
        """Return the cached prefix of a waiting request. The last result is reused if the cache has not changed since.

        The match never contains the request's last token: the model must compute at least one position. It contains no
        position whose logits the request needs for ``prompt_logprobs`` either.
        """
        last: _PrefixMatch | None = req.prefix_match
        if last is None:
            ids, size = req.tokens(), self.spec.page_size
            end = _num_reusable_tokens(req) // size * size
            key = Key(req.params.cache_salt, ids[:end])
            last = req.prefix_match = _PrefixMatch(ids, key)
        if last.version != self._version or last.result is None:
            last.result = self.cache.match(last.key) if last.result is None else self._rematch(last.key, last.result)
            last.version = self._version
        return last.result

    def waiting_views(self, waiting: Iterable[Req], prefilling: Iterable[Req], step: int) -> Iterator[Waiting]:
        """Yield the policy's view of each request in ``waiting``, which is in order of arrival, for step ``step``.

        The ``same_prefix_req`` of a request is one of ``prefilling``, the running requests that compute their prompt,
        or a request yielded before.
        """
        size, num_computed_tokens = self.spec.page_size, self.request_table.num_computed_tokens
        computing: dict[object, int] = {}  # a prefix in whole pages -> the first request to compute its last page

        def first_to_compute(req: Req, page: int) -> int | None:
            key = self.next_page_key(req, page)
            return None if key is None else computing.setdefault(key, req.uid)

        for req in prefilling:
            first_to_compute(req, int(num_computed_tokens[req.req_pool_idx]) // size)
        for req in waiting:
            num_cached_pages = len(self.match(req).pages)
            first = first_to_compute(req, num_cached_pages)
            yield Waiting(
                req.uid,
                req.arrival,
                len(req),
                num_cached_pages * size,
                None if first == req.uid else first,
                step - req.queued_at_step,
                req.priority,
            )

    def next_page_key(self, req: Req, page: int) -> tuple[str | None, int] | None:
        """Return a key of the request's first ``page + 1`` pages of tokens: its ``cache_salt``, and a hash.

        None means that the request could not use page number ``page`` from the cache: `match` leaves it out. Requests
        with an equal key are about to compute the same page, so one of them waits. The key does not decide which KV a
        request reads: the prefix cache compares token ids. `match` was called for the request before.
        """
        end = (page + 1) * self.spec.page_size
        if end > _num_reusable_tokens(req):
            return None
        last = req.prefix_match
        if last.next_page != page:  # the hash is keyed with a secret: no client can make two equal ones
            last.next_page, last.next_page_hash = page, hash(last.ids[:end].tobytes())
        return req.params.cache_salt, last.next_page_hash

    # ---- free -> allocated ---------------------------------------------------------------------------

    def lock_prefixes(self, reqs: Sequence[Req], step: int) -> list[MatchResult]:
        """Lock the cached prefix of each request, and return it.

        All are locked before the first page is allocated, so that no allocation evicts one of them.
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
        return matches

    def _allocate(self, n: int, owner: int | I32) -> I32:
        """Allocate ``n`` pages for ``owner`` (or ``owner[i]`` each). Evict cached pages first if too few are free."""
        if n > self.allocator.num_free:
            self._evict(n - self.allocator.num_free)
        return super()._allocate(n, owner)

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

    # ---- computed -> cached, and retired -> free -------------------------------------------------------

    def step_launched(self, step: Step, reqs: Sequence[Req]) -> None:
        """Offer to the cache the whole pages of prompts that ``step`` computes, in the prefill chunks of ``reqs``."""
        super().step_launched(step, reqs)
        if not reqs:
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
        """Release requests that have ended or are retracted: full pages of computed tokens go to the cache.

        The other pages and the rows become free, and the cached prefixes become unlocked, once the result of the last
        launched step has been read.
        """
        table = self.request_table
        rows = np.array([req.req_pool_idx for req in reqs], np.int32)
        # num_computed_tokens may be ahead of the tokens that the scheduler knows: a launched step computes a token's KV
        # before the scheduler has read that token.
        known = np.minimum(table.num_computed_tokens[rows], [len(req) for req in reqs])
        end_pages = (known // self.spec.page_size).tolist()
        self._insert(
            [(req, req.tokens(), end) for req, end in zip(reqs, end_pages, strict=True) if end > req.num_cached_pages]
        )
        cached = np.concatenate([table.pages_of(req)[: req.num_cached_pages] for req in reqs])
        self._pending_unlocks.append((self.last_launched_step, [req.cache_handle for req in reqs], cached))
        super().release(reqs)
        for req in reqs:
            req.num_cached_pages = 0
            req.cache_handle = req.prefix_match = None
        self.free_retired(self.allocator.last_read_step)

    def free_retired(self, step: int) -> None:
        """Free the pages and unlock the prefixes that waited for the result of ``step``, which has now been read."""
        super().free_retired(step)
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


def make_manager(spec: EngineSpec, cache: PrefixCache, events: Observer) -> CacheManager:
    """Return the manager of a cache. The pages of a prefix hold no recurrent state, so they are no use without it."""
    reuses = cache.reuses and not spec.has_states
    return PrefixCacheManager(spec, cache, events) if reuses else CacheManager(spec, events)


@hookimpl(trylast=True)
def minisgl_cache_manager() -> Any:
    return make_manager
