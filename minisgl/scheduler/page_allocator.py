"""The only owner of free pages and slots (promise 3). It knows numbers and owners, neither KV memory nor requests.

A page is free, owned by one request, owned by the cache (with a count of users), or retiring: given back, but a step
that was launched before may still touch it. It is free once the last step launched before it was given back was read.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from minisgl.core import I32

FREE, RETIRING, CACHE = -1, -2, -3


class PageOwnershipError(AssertionError):
    """Someone took, gave or used a page or slot that was not theirs. Never a user's fault."""


class _OwnerTable:
    """Owners of one kind of thing, numbered from 0, with a stack of free ones."""

    def __init__(self, kind: str, count: int):
        self.kind = kind
        self.size = count
        self.owner: I32 = np.full(count, FREE, np.int32)
        self._stack: I32 = np.arange(count - 1, -1, -1, dtype=np.int32)  # the lowest number on top
        self.num_free = count
        self.num_retiring = 0

    def allocate(self, n: int, owner: int | I32) -> I32:
        if n > self.num_free:
            raise PageOwnershipError(f"{n} {self.kind}s wanted, {self.num_free} free of {self.size}")
        self.num_free -= n
        taken: I32 = self._stack[self.num_free : self.num_free + n][::-1].copy()
        self.owner[taken] = owner
        return taken

    def check_owner(self, things: I32, owner: int | I32, verb: str) -> None:
        wrong = np.flatnonzero(self.owner[things] != owner)
        if len(wrong):
            i = int(wrong[0])
            who = int(owner) if np.ndim(owner) == 0 else int(np.asarray(owner)[i])
            raise PageOwnershipError(
                f"{verb} {self.kind} {int(things[i])} of {_name(who)}, but it is {_state(int(self.owner[things[i]]))}"
            )

    def retire(self, things: I32, owner: int) -> None:
        self.check_owner(things, owner, "give back")
        self.owner[things] = RETIRING
        self.num_retiring += len(things)
        if len(things) > 1 and len(np.unique(things)) < len(things):
            raise PageOwnershipError(f"{self.kind}s given back twice in one call by {_name(owner)}: {things.tolist()}")

    def free_retired(self, things: I32) -> None:
        self.check_owner(things, RETIRING, "free")
        self.num_retiring -= len(things)
        self.free_now(things)

    def free_now(self, things: I32) -> None:
        self.owner[things] = FREE
        self._stack[self.num_free : self.num_free + len(things)] = things
        self.num_free += len(things)

    def check(self) -> None:
        stack = self._stack[: self.num_free]
        free = np.flatnonzero(self.owner == FREE)
        if len(free) != self.num_free or not np.array_equal(np.sort(stack), free):
            raise PageOwnershipError(
                f"the free {self.kind}s and their owners disagree: {self.num_free} on the stack, {len(free)} free"
            )
        if int((self.owner == RETIRING).sum()) != self.num_retiring:
            raise PageOwnershipError(f"{self.num_retiring} {self.kind}s should be retiring")


class PageAllocator:
    """Who owns which page and which slot. Every change of owner goes through it, and is checked."""

    def __init__(self, num_pages: int, num_slots: int):
        self.pages = _OwnerTable("page", num_pages)
        self.req_pool = _OwnerTable("slot", num_slots)
        self.ref_counts: I32 = np.zeros(num_pages, np.int32)
        self._retired: deque[tuple[int, I32, I32]] = deque()
        self._last_read_step = -1

    @property
    def num_free(self) -> int:
        """Pages that nobody owns and no unread step touches."""
        return self.pages.num_free

    @property
    def num_retiring(self) -> int:
        """Pages given back that an unread step may touch."""
        return self.pages.num_retiring

    def allocate(self, n: int, owner: int | I32) -> I32:
        """``n`` free pages for one owner, or for ``owner[i]`` each. Raises `PageOwnershipError` if fewer are free."""
        return self.pages.allocate(n, owner)

    def allocate_req_pool_idx(self, owner: int) -> int:
        """A free slot."""
        return int(self.req_pool.allocate(1, owner)[0])

    def retire(self, pages: I32, owner: int, after: int, slots: I32 | None = None) -> None:
        """``owner`` gives back pages (and slots): free once the result of step ``after`` was read."""
        self.pages.retire(pages, owner)
        none = np.empty(0, np.int32)
        if slots is not None:
            self.req_pool.retire(slots, owner)
        self._retired.append((after, pages, none if slots is None else slots))
        self.free_retired(self._last_read_step)

    def free_retired(self, step: int) -> None:
        """The result of ``step`` was read: what waited for it is free."""
        self._last_read_step = step
        while self._retired and self._retired[0][0] <= step:
            _, pages, slots = self._retired.popleft()
            self.pages.free_retired(pages)
            self.req_pool.free_retired(slots)

    def transfer_to_cache(self, pages: I32, owner: int) -> None:
        """The cache takes over pages that were ``owner``'s."""
        self.pages.check_owner(pages, owner, "adopt")
        self.pages.owner[pages] = CACHE

    def incref(self, pages: I32) -> None:
        """One more request uses these pages of the cache."""
        self.pages.check_owner(pages, CACHE, "use")
        self.ref_counts[pages] += 1

    def decref(self, pages: I32) -> None:
        """One request fewer uses these pages of the cache."""
        self.pages.check_owner(pages, CACHE, "leave")
        if len(pages) and int(self.ref_counts[pages].min()) < 1:
            raise PageOwnershipError(
                f"pages left by one who did not use them: {pages[self.ref_counts[pages] < 1].tolist()}"
            )
        self.ref_counts[pages] -= 1

    def free_evicted(self, pages: I32) -> None:
        """The cache gave up pages. Nobody may use them, so they are free at once."""
        self.pages.check_owner(pages, CACHE, "evict")
        if len(pages) and int(self.ref_counts[pages].max()) > 0:
            raise PageOwnershipError(f"evicted while in use: pages {pages[self.ref_counts[pages] > 0].tolist()}")
        self.pages.free_now(pages)

    def check(self, held: int | None = None) -> None:
        """Raise `PageOwnershipError` where the books are not in order; ``held``: pages that the cache says it owns."""
        self.pages.check()
        self.req_pool.check()
        cached = self.pages.owner == CACHE
        if held is not None and int(cached.sum()) != held:
            raise PageOwnershipError(f"the cache says it holds {held} pages; the ledger has {int(cached.sum())}")
        if (self.ref_counts[~cached] != 0).any() or (self.ref_counts < 0).any():
            raise PageOwnershipError("a page that the cache does not own has users")

    def check_idle(self, held: int) -> None:
        """Promise 9: free + cached + retiring = all, and nobody uses anything."""
        pages, slots = self.pages, self.req_pool
        if pages.num_free + held + pages.num_retiring != pages.size:
            lost = np.unique(pages.owner[pages.owner >= 0]).tolist()
            raise PageOwnershipError(
                f"pages are lost: {pages.num_free} free + {held} cached + {pages.num_retiring} retiring is not "
                f"{pages.size}; still owned by requests {lost}"
            )
        if self.ref_counts.any():
            raise PageOwnershipError(f"idle, but pages {np.flatnonzero(self.ref_counts).tolist()} have users")
        if slots.num_free + slots.num_retiring != slots.size:
            raise PageOwnershipError(f"idle, but slots {np.flatnonzero(slots.owner >= 0).tolist()} are taken")


def _name(owner: int) -> str:
    return {FREE: "nobody", RETIRING: "the retiring", CACHE: "the cache"}.get(owner, f"request {owner}")


def _state(owner: int) -> str:
    return {FREE: "free", RETIRING: "retiring", CACHE: "the cache's"}.get(owner, f"request {owner}'s")
