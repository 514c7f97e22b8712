"""The only owner of free pages and slots (promise 3). It knows numbers and owners, neither KV memory nor requests.

A page is free, owned by one request, owned by the cache (with a count of users), or retiring: given back, but a step
that was launched before may still touch it. It is free once the last step launched before it was given back was read.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from minisgl.core import I32

FREE, RETIRING, CACHE = -1, -2, -3


class LedgerError(AssertionError):
    """Someone took, gave or used a page or slot that was not theirs. Never a user's fault."""


class _Book:
    """Owners of one kind of thing, numbered from 0, with a stack of free ones."""

    def __init__(self, kind: str, count: int):
        self.kind = kind
        self.count = count
        self.owner: I32 = np.full(count, FREE, np.int32)
        self._stack: I32 = np.arange(count - 1, -1, -1, dtype=np.int32)  # the lowest number on top
        self.free = count
        self.retiring = 0

    def take(self, n: int, owner: int | I32) -> I32:
        if n > self.free:
            raise LedgerError(f"{n} {self.kind}s wanted, {self.free} free of {self.count}")
        self.free -= n
        taken: I32 = self._stack[self.free : self.free + n][::-1].copy()
        self.owner[taken] = owner
        return taken

    def expect(self, things: I32, owner: int | I32, verb: str) -> None:
        wrong = np.flatnonzero(self.owner[things] != owner)
        if len(wrong):
            i = int(wrong[0])
            who = int(owner) if np.ndim(owner) == 0 else int(np.asarray(owner)[i])
            raise LedgerError(
                f"{verb} {self.kind} {int(things[i])} of {_name(who)}, but it is {_state(int(self.owner[things[i]]))}"
            )

    def retire(self, things: I32, owner: int) -> None:
        self.expect(things, owner, "give back")
        self.owner[things] = RETIRING
        self.retiring += len(things)
        if len(things) > 1 and len(np.unique(things)) < len(things):
            raise LedgerError(f"{self.kind}s given back twice in one call by {_name(owner)}: {things.tolist()}")

    def release(self, things: I32) -> None:
        self.expect(things, RETIRING, "free")
        self.retiring -= len(things)
        self.push(things)

    def push(self, things: I32) -> None:
        self.owner[things] = FREE
        self._stack[self.free : self.free + len(things)] = things
        self.free += len(things)

    def check(self) -> None:
        stack = self._stack[: self.free]
        free = np.flatnonzero(self.owner == FREE)
        if len(free) != self.free or not np.array_equal(np.sort(stack), free):
            raise LedgerError(
                f"the free {self.kind}s and their owners disagree: {self.free} on the stack, {len(free)} free"
            )
        if int((self.owner == RETIRING).sum()) != self.retiring:
            raise LedgerError(f"{self.retiring} {self.kind}s should be retiring")


class PageLedger:
    """Who owns which page and which slot. Every change of owner goes through it, and is checked."""

    def __init__(self, num_pages: int, num_slots: int):
        self.pages = _Book("page", num_pages)
        self.slots = _Book("slot", num_slots)
        self.users: I32 = np.zeros(num_pages, np.int32)
        self._queue: deque[tuple[int, I32, I32]] = deque()
        self._read = -1

    @property
    def free(self) -> int:
        """Pages that nobody owns and no unread step touches."""
        return self.pages.free

    @property
    def retiring(self) -> int:
        """Pages given back that an unread step may touch."""
        return self.pages.retiring

    def take(self, n: int, owner: int | I32) -> I32:
        """``n`` free pages for one owner, or for ``owner[i]`` each. Raises `LedgerError` if fewer are free."""
        return self.pages.take(n, owner)

    def take_slot(self, owner: int) -> int:
        """A free slot."""
        return int(self.slots.take(1, owner)[0])

    def give(self, pages: I32, owner: int, after: int, slots: I32 | None = None) -> None:
        """``owner`` gives back pages (and slots): free once the result of step ``after`` was read."""
        self.pages.retire(pages, owner)
        none = np.empty(0, np.int32)
        if slots is not None:
            self.slots.retire(slots, owner)
        self._queue.append((after, pages, none if slots is None else slots))
        self.done(self._read)

    def done(self, step: int) -> None:
        """The result of ``step`` was read: what waited for it is free."""
        self._read = step
        while self._queue and self._queue[0][0] <= step:
            _, pages, slots = self._queue.popleft()
            self.pages.release(pages)
            self.slots.release(slots)

    def adopt(self, pages: I32, owner: int) -> None:
        """The cache takes over pages that were ``owner``'s."""
        self.pages.expect(pages, owner, "adopt")
        self.pages.owner[pages] = CACHE

    def use(self, pages: I32) -> None:
        """One more request uses these pages of the cache."""
        self.pages.expect(pages, CACHE, "use")
        self.users[pages] += 1

    def leave(self, pages: I32) -> None:
        """One request fewer uses these pages of the cache."""
        self.pages.expect(pages, CACHE, "leave")
        if len(pages) and int(self.users[pages].min()) < 1:
            raise LedgerError(f"pages left by one who did not use them: {pages[self.users[pages] < 1].tolist()}")
        self.users[pages] -= 1

    def evicted(self, pages: I32) -> None:
        """The cache gave up pages. Nobody may use them, so they are free at once."""
        self.pages.expect(pages, CACHE, "evict")
        if len(pages) and int(self.users[pages].max()) > 0:
            raise LedgerError(f"evicted while in use: pages {pages[self.users[pages] > 0].tolist()}")
        self.pages.push(pages)

    def check(self, held: int | None = None) -> None:
        """Raise `LedgerError` where the books are not in order; ``held``: pages that the cache says it owns."""
        self.pages.check()
        self.slots.check()
        cached = self.pages.owner == CACHE
        if held is not None and int(cached.sum()) != held:
            raise LedgerError(f"the cache says it holds {held} pages; the ledger has {int(cached.sum())}")
        if (self.users[~cached] != 0).any() or (self.users < 0).any():
            raise LedgerError("a page that the cache does not own has users")

    def check_idle(self, held: int) -> None:
        """Promise 9: free + cached + retiring = all, and nobody uses anything."""
        pages, slots = self.pages, self.slots
        if pages.free + held + pages.retiring != pages.count:
            lost = np.unique(pages.owner[pages.owner >= 0]).tolist()
            raise LedgerError(
                f"pages are lost: {pages.free} free + {held} cached + {pages.retiring} retiring is not "
                f"{pages.count}; still owned by requests {lost}"
            )
        if self.users.any():
            raise LedgerError(f"idle, but pages {np.flatnonzero(self.users).tolist()} have users")
        if slots.free + slots.retiring != slots.count:
            raise LedgerError(f"idle, but slots {np.flatnonzero(slots.owner >= 0).tolist()} are taken")


def _name(owner: int) -> str:
    return {FREE: "nobody", RETIRING: "the retiring", CACHE: "the cache"}.get(owner, f"request {owner}")


def _state(owner: int) -> str:
    return {FREE: "free", RETIRING: "retiring", CACHE: "the cache's"}.get(owner, f"request {owner}'s")
