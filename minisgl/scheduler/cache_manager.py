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
from minisgl.kvcache import Key, Match, PrefixCache
from minisgl.scheduler.budget import Cost
from minisgl.scheduler.events import Events
from minisgl.scheduler.page_allocator import PageLedger
from minisgl.scheduler.request_table import Slots

_HASH_BASE = np.uint64(0x9E3779B97F4A7C15)  # odd: its powers never vanish modulo 2^64
_HASH_MIX = np.uint64(0xD6E8FEB86659FD93)


class Memory:
    """The ledger, the cache and the table rows of one scheduler, kept in step with each other."""

    LOOKAHEAD = 32
    """Tokens that each running request is expected to write: admission leaves their pages alone."""

    def __init__(self, spec: EngineSpec, cache: PrefixCache, events: Events):
        self.spec = spec
        self.cache = cache
        self.events = events
        self.ledger = PageLedger(spec.num_pages, spec.max_slots)
        self.slots = Slots(spec)
        self.launched = -1  # the last step that was launched
        self.read = -1
        self.evicted_pages = 0
        self._version = 0  # of the cache's content and locks: what `match` found before is void
        self._unlocks: deque[tuple[int, Any, I32]] = deque()
        self._writes: list[tuple[I32, I32, I32]] = []  # slots, columns, pages
        self._taken: list[tuple[I32, I32]] = []

    # ---- what fits ----------------------------------------------------------------------------------

    @property
    def available(self) -> int:
        """Pages that can be had now: free, or the cache's and used by nobody."""
        return self.ledger.free + self.cache.evictable

    @property
    def settling(self) -> bool:
        """Whether reading a launched step would free pages."""
        return self.ledger.retiring > 0 or len(self._unlocks) > 0

    def match(self, req: Req) -> Match:
        """What the cache holds of a waiting request: at most all but its last token, which is always computed."""
        if req.match is None or req.match[0] != self._version:
            ids = req.match[2] if req.match is not None else req.tokens().astype(np.int64)
            whole = (len(ids) - 1) // self.spec.page_size * self.spec.page_size
            req.match = (self._version, self.cache.match(Key(None, ids[:whole])), ids)
        found: Match = req.match[1]
        return found

    def cost(self, req: Req) -> Cost:
        """Pages to seat a waiting request, and those that its next tokens will need."""
        match, size = self.match(req), self.spec.page_size
        whole = -(-len(req) // size)
        soon = -(-max(min(len(req) + self.LOOKAHEAD, req.max_len - 1), len(req)) // size)
        return Cost(whole - len(match.pages) + match.unlocked, soon - whole)

    def next_page_hash(self, req: Req, page: int) -> int | None:
        """A number that two requests share if and only if they begin with the same ``page + 1`` whole pages."""
        if not self.cache.reuses:
            return None
        if req.hashes is None:
            req.hashes = _page_hashes(req.tokens(), self.spec.page_size)
        return req.hashes[page] if page < len(req.hashes) else None

    # ---- into slots and pages ------------------------------------------------------------------------

    def seat(self, reqs: Sequence[Req], step: int) -> None:
        """Give each request a slot and pages for all its tokens. Every match is locked before anything is evicted."""
        matches = []
        for req in reqs:
            self._version += 1  # a lock may split a node: earlier handles are void
            match = self.match(req)
            self.cache.lock(match.handle)
            self.ledger.use(match.pages)
            matches.append(match)
            self.events.prefix_matched(req, match.pages, step)
        for req, match in zip(reqs, matches, strict=True):
            shared = len(match.pages)
            fresh = self._take(-(-len(req) // self.spec.page_size) - shared, req.uid)
            req.handle, req.shared = match.handle, shared
            req.slot = self.ledger.take_slot(req.uid)
            pages = np.concatenate((match.pages, fresh))
            self.slots.seat_req(req, pages, shared * self.spec.page_size, step - 1)
            self._writes.append((np.full(len(pages), req.slot, np.int32), np.arange(len(pages), dtype=np.int32), pages))

    def grow(self, slots: I32) -> None:
        """One page more for each of these decode slots."""
        n = len(slots)
        pages = self._take(n, self.slots.uid[slots])
        cols = self.slots.pages[slots]
        self.slots.table[slots, cols] = pages
        self.slots.pages[slots] += 1
        self._writes.append((slots, cols, pages))

    def _take(self, n: int, owner: int | I32) -> I32:
        if n > self.ledger.free:
            gone = self.cache.evict(n - self.ledger.free)
            self.ledger.evicted(gone)
            self._version += 1
            self.evicted_pages += len(gone)
            self.events.pages_evicted(self.launched + 1, gone)
        pages = self.ledger.take(n, owner)
        if n:
            self._taken.append((np.broadcast_to(np.asarray(owner, np.int32), n), pages))
        return pages

    def table_writes(self) -> tuple[I32, I32, I32]:
        """The page-table entries that changed since the last step: (slot, column, page), in order."""
        writes, self._writes = self._writes, []
        taken, self._taken = self._taken, []
        if taken:
            owners, pages = (np.concatenate(parts) for parts in zip(*taken, strict=True))
            self.events.pages_allocated(self.launched + 1, owners, pages)
        if not writes:
            return _NONE.copy(), _NONE.copy(), _NONE.copy()
        slots, columns, pages = (np.concatenate(parts) for parts in zip(*writes, strict=True))
        return slots, columns, pages

    # ---- into the cache, and out of the slot -----------------------------------------------------------

    def cache_prompt(self, req: Req) -> None:
        """Offer the whole pages that launched steps have computed of a prompt."""
        whole = int(min(self.slots.computed[req.slot], self.slots.target[req.slot])) // self.spec.page_size
        if self.cache.reuses and whole > req.shared:
            self._insert(req, req.match[2], whole)

    def _insert(self, req: Req, ids: I64, whole: int) -> None:
        start, slot = req.shared, req.slot
        mine = self.slots.table[slot, start:whole].copy()
        handle, held = self.cache.insert(req.handle, Key(None, ids[: whole * self.spec.page_size]), start, mine)
        self._version += 1
        if len(held) == 0:
            return
        mine = mine[: len(held)]
        new = held == mine
        self.ledger.adopt(mine[new], req.uid)
        self.events.pages_cached(self.launched, req, mine[new], start, held)
        self.cache.lock(handle)
        self.ledger.use(held)
        self.cache.unlock(req.handle)
        req.handle, req.shared = handle, start + len(held)
        if not new.all():
            # Computed twice: point the request at the cache's pages, and only then let its own go (promise 4).
            cols = (start + np.flatnonzero(~new)).astype(np.int32)
            self.slots.table[slot, cols] = held[~new]
            self._writes.append((np.full(len(cols), slot, np.int32), cols, held[~new]))
            self._give(req.uid, mine[~new])

    def release(self, req: Req) -> None:
        """Take a request's slot and pages away. What it computed goes to the cache; what a launched step may still
        touch is free once that step was read, and stays locked until then."""
        known = int(min(self.slots.computed[req.slot], len(req)))
        whole = known // self.spec.page_size
        if self.cache.reuses and whole > req.shared:
            self._insert(req, req.tokens().astype(np.int64), whole)
        row = self.slots.row(req)
        self._writes = [(s[k], c[k], p[k]) for s, c, p in self._writes if (k := s != req.slot).any()]
        self._unlocks.append((self.launched, req.handle, row[: req.shared]))
        self._give(req.uid, row[req.shared :], np.array([req.slot], np.int32))
        self.slots.clear(req)
        req.slot, req.seated, req.shared, req.handle, req.match, req.hashes = -1, -1, 0, None, None, None
        self.done(self.read)

    def _give(self, uid: int, pages: I32, slots: I32 | None = None) -> None:
        self.events.pages_freed(self.launched, uid, pages)  # told first: an observer hears what the ledger may refuse
        self.ledger.give(pages, uid, self.launched, slots)

    def done(self, step: int) -> None:
        """The result of ``step`` was read: what waited for it is free."""
        self.read = step
        self.ledger.done(step)
        while self._unlocks and self._unlocks[0][0] <= step:
            _, handle, pages = self._unlocks.popleft()
            self.ledger.leave(pages)
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
