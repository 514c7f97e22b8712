"""Pages of requests: from the ledger and the cache into a request's table row, and back.

Knows which pages hold which tokens, and which steps were launched and read; nothing of policies. A prompt's pages are
offered to the cache as soon as the step that writes them is launched: whoever matches them runs in a later step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from minisgl.core import I32, I64, EngineSpec, Req
from minisgl.kvcache import Key, MatchResult, PrefixCache
from minisgl.scheduler.budget import AdmissionCost
from minisgl.scheduler.events import Events
from minisgl.scheduler.page_allocator import PageAllocator
from minisgl.scheduler.request_table import RequestTable

_HASH_BASE = np.uint64(0x9E3779B97F4A7C15)  # odd: its powers never vanish modulo 2^64
_HASH_MIX = np.uint64(0xD6E8FEB86659FD93)


class CacheManager:
    """The ledger, the cache and the table rows of one scheduler, kept in step with each other."""

    LOOKAHEAD = 32
    """Tokens that each running request is expected to write: admission leaves their pages alone."""

    def __init__(self, spec: EngineSpec, cache: PrefixCache, events: Events):
        self.spec = spec
        self.cache = cache
        self.events = events
        self.allocator = PageAllocator(spec.num_pages, spec.max_running_requests)
        self.request_table = RequestTable(spec)
        self.last_launched_step = -1  # the last step that was launched
        self.last_read_step = -1
        self.evicted_pages = 0
        self._version = 0  # of the cache's content and locks: what `match` found before is void
        self._pending_unlocks: deque[tuple[int, Any, I32]] = deque()
        self._page_table_updates: list[tuple[I32, I32, I32]] = []  # slots, columns, pages
        self._allocated: list[tuple[I32, I32]] = []

    # ---- what fits ----------------------------------------------------------------------------------

    @property
    def num_available_pages(self) -> int:
        """Pages that can be had now: free, or the cache's and used by nobody."""
        return self.allocator.num_free + self.cache.evictable_pages

    @property
    def has_pending_frees(self) -> bool:
        """Whether reading a launched step would free pages."""
        return self.allocator.num_retiring > 0 or len(self._pending_unlocks) > 0

    def match(self, req: Req) -> MatchResult:
        """What the cache holds of a waiting request: at most all but its last token, which is always computed."""
        if req.prefix_match is None or req.prefix_match[0] != self._version:
            ids = req.prefix_match[2] if req.prefix_match is not None else req.tokens().astype(np.int64)
            whole = (len(ids) - 1) // self.spec.page_size * self.spec.page_size
            req.prefix_match = (self._version, self.cache.match(Key(None, ids[:whole])), ids)
        found: MatchResult = req.prefix_match[1]
        return found

    def admission_cost(self, req: Req) -> AdmissionCost:
        """Pages to seat a waiting request, and those that its next tokens will need."""
        match, size = self.match(req), self.spec.page_size
        whole = -(-len(req) // size)
        soon = -(-max(min(len(req) + self.LOOKAHEAD, req.max_len - 1), len(req)) // size)
        return AdmissionCost(whole - len(match.pages) + match.unlocked, soon - whole)

    def next_page_hash(self, req: Req, page: int) -> int | None:
        """A number that two requests share if and only if they begin with the same ``page + 1`` whole pages."""
        if not self.cache.reuses:
            return None
        if req.page_hashes is None:
            req.page_hashes = _page_hashes(req.tokens(), self.spec.page_size)
        return req.page_hashes[page] if page < len(req.page_hashes) else None

    # ---- into slots and pages ------------------------------------------------------------------------

    def admit(self, reqs: Sequence[Req], step: int) -> None:
        """Give each request a slot and pages for all its tokens. Every match is locked before anything is evicted."""
        matches = []
        for req in reqs:
            self._version += 1  # a lock may split a node: earlier handles are void
            match = self.match(req)
            self.cache.lock(match.handle)
            self.allocator.incref(match.pages)
            matches.append(match)
            self.events.prefix_matched(req, match.pages, step)
        for req, match in zip(reqs, matches, strict=True):
            shared = len(match.pages)
            fresh = self._allocate(-(-len(req) // self.spec.page_size) - shared, req.uid)
            req.cache_handle, req.num_cached_pages = match.handle, shared
            req.req_pool_idx = self.allocator.allocate_req_pool_idx(req.uid)
            pages = np.concatenate((match.pages, fresh))
            self.request_table.admit(req, pages, shared * self.spec.page_size, step - 1)
            self._page_table_updates.append(
                (np.full(len(pages), req.req_pool_idx, np.int32), np.arange(len(pages), dtype=np.int32), pages)
            )

    def allocate_decode_pages(self, slots: I32) -> None:
        """One page more for each of these decode slots."""
        n = len(slots)
        pages = self._allocate(n, self.request_table.uid[slots])
        cols = self.request_table.num_pages[slots]
        self.request_table.page_table[slots, cols] = pages
        self.request_table.num_pages[slots] += 1
        self._page_table_updates.append((slots, cols, pages))

    def _allocate(self, n: int, owner: int | I32) -> I32:
        if n > self.allocator.num_free:
            gone = self.cache.evict(n - self.allocator.num_free)
            self.allocator.free_evicted(gone)
            self._version += 1
            self.evicted_pages += len(gone)
            self.events.pages_evicted(self.last_launched_step + 1, gone)
        pages = self.allocator.allocate(n, owner)
        if n:
            self._allocated.append((np.broadcast_to(np.asarray(owner, np.int32), n), pages))
        return pages

    def pop_page_table_updates(self) -> tuple[I32, I32, I32]:
        """The page-table entries that changed since the last step: (slot, column, page), in order."""
        writes, self._page_table_updates = self._page_table_updates, []
        taken, self._allocated = self._allocated, []
        if taken:
            owners, pages = (np.concatenate(parts) for parts in zip(*taken, strict=True))
            self.events.pages_allocated(self.last_launched_step + 1, owners, pages)
        if not writes:
            return _NONE.copy(), _NONE.copy(), _NONE.copy()
        slots, columns, pages = (np.concatenate(parts) for parts in zip(*writes, strict=True))
        return slots, columns, pages

    # ---- into the cache, and out of the slot -----------------------------------------------------------

    def cache_prompt(self, req: Req) -> None:
        """Offer the whole pages that launched steps have computed of a prompt."""
        whole = (
            int(
                min(
                    self.request_table.num_computed_tokens[req.req_pool_idx],
                    self.request_table.num_prefill_tokens[req.req_pool_idx],
                )
            )
            // self.spec.page_size
        )
        if self.cache.reuses and whole > req.num_cached_pages:
            self._insert(req, req.prefix_match[2], whole)

    def _insert(self, req: Req, ids: I64, whole: int) -> None:
        start, slot = req.num_cached_pages, req.req_pool_idx
        mine = self.request_table.page_table[slot, start:whole].copy()
        handle, held = self.cache.insert(req.cache_handle, Key(None, ids[: whole * self.spec.page_size]), start, mine)
        self._version += 1
        if len(held) == 0:
            return
        mine = mine[: len(held)]
        new = held == mine
        self.allocator.transfer_to_cache(mine[new], req.uid)
        self.events.pages_cached(self.last_launched_step, req, mine[new], start, held)
        self.cache.lock(handle)
        self.allocator.incref(held)
        self.cache.unlock(req.cache_handle)
        req.cache_handle, req.num_cached_pages = handle, start + len(held)
        if not new.all():
            # Computed twice: point the request at the cache's pages, and only then let its own go (promise 4).
            cols = (start + np.flatnonzero(~new)).astype(np.int32)
            self.request_table.page_table[slot, cols] = held[~new]
            self._page_table_updates.append((np.full(len(cols), slot, np.int32), cols, held[~new]))
            self._retire(req.uid, mine[~new])

    def release(self, req: Req) -> None:
        """Take a request's slot and pages away. What it computed goes to the cache; what a launched step may still
        touch is free once that step was read, and stays locked until then."""
        known = int(min(self.request_table.num_computed_tokens[req.req_pool_idx], len(req)))
        whole = known // self.spec.page_size
        if self.cache.reuses and whole > req.num_cached_pages:
            self._insert(req, req.tokens().astype(np.int64), whole)
        row = self.request_table.pages_of(req)
        self._page_table_updates = [
            (s[k], c[k], p[k]) for s, c, p in self._page_table_updates if (k := s != req.req_pool_idx).any()
        ]
        self._pending_unlocks.append((self.last_launched_step, req.cache_handle, row[: req.num_cached_pages]))
        self._retire(req.uid, row[req.num_cached_pages :], np.array([req.req_pool_idx], np.int32))
        self.request_table.remove(req)
        (
            req.req_pool_idx,
            req.admission_order,
            req.num_cached_pages,
            req.cache_handle,
            req.prefix_match,
            req.page_hashes,
        ) = -1, -1, 0, None, None, None
        self.free_retired(self.last_read_step)

    def _retire(self, uid: int, pages: I32, slots: I32 | None = None) -> None:
        self.events.pages_freed(
            self.last_launched_step, uid, pages
        )  # told first: an observer hears what the ledger may refuse
        self.allocator.retire(pages, uid, self.last_launched_step, slots)

    def free_retired(self, step: int) -> None:
        """The result of ``step`` was read: what waited for it is free."""
        self.last_read_step = step
        self.allocator.free_retired(step)
        while self._pending_unlocks and self._pending_unlocks[0][0] <= step:
            _, handle, pages = self._pending_unlocks.popleft()
            self.allocator.decref(pages)
            self.cache.unlock(handle)
            self._version += 1


def _page_hashes(tokens: I32, page_size: int) -> list[int]:
    """Polynomial hashes modulo 2^64 of the prefixes of 1, 2, … whole pages."""
    whole = len(tokens) // page_size * page_size
    if whole == 0:
        return []
    mixed = (tokens[:whole].astype(np.uint64) + np.uint64(1)) * _HASH_MIX
    mixed ^= mixed >> np.uint64(29)
    powers = np.cumprod(np.full(whole, _HASH_BASE, np.uint64))
    sums = np.cumsum(mixed * powers)
    out: list[int] = sums[page_size - 1 :: page_size].tolist()
    return out


_NONE = np.empty(0, np.int32)
