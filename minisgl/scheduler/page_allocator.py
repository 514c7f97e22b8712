"""The allocator of KV pages and request-pool rows, which records the owner of each (promise 3).

A page is in one of four states:

- free;
- owned by one request;
- owned by the prefix cache, with a count of the running requests that use the page;
- retiring: its owner has returned the page, but a step that was launched before may still read or write it. The page
  becomes free once the result of the last such step has been read.

A row of the request pool is free, owned by one request, or retiring. The allocator knows numbers and owners only,
neither KV memory nor requests.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from minisgl.core import I32

FREE, RETIRING, CACHE = -1, -2, -3


class PageOwnershipError(AssertionError):
    """A call contradicts the recorded owner of a page or request-pool row: a bug in minisgl, never a user's mistake."""


class _OwnerTable:
    """The owners of ``count`` numbered resources (pages or request-pool rows), with a stack of the free ones.

    ``owner[i]`` is a request's uid, or FREE, RETIRING or CACHE. ``kind`` is the resource's name in error messages.
    """

    def __init__(self, kind: str, count: int):
        self.kind = kind
        self.size = count
        self.owner: I32 = np.full(count, FREE, np.int32)
        self._stack: I32 = np.arange(count - 1, -1, -1, dtype=np.int32)  # the lowest number on top
        self.num_free = count
        self.num_retiring = 0

    def allocate(self, n: int, owner: int | I32) -> I32:
        if n > self.num_free:
            raise PageOwnershipError(f"{n} {self.kind}s requested, {self.num_free} free of {self.size}")
        self.num_free -= n
        ids: I32 = self._stack[self.num_free : self.num_free + n][::-1].copy()
        self.owner[ids] = owner
        return ids

    def check_owner(self, ids: I32, owner: int | I32, action: str) -> None:
        """Raise `PageOwnershipError` unless ``owner`` owns all ``ids`` (an array: ``owner[i]`` owns ``ids[i]``)."""
        wrong = self.owner[ids] != owner
        if np.count_nonzero(wrong):
            i = int(wrong.argmax())
            expected = int(owner) if np.ndim(owner) == 0 else int(np.asarray(owner)[i])
            raise PageOwnershipError(
                f"cannot {action} {self.kind} {int(ids[i])} of {_name(expected)}: "
                f"the {self.kind} {_state(int(self.owner[ids[i]]))}"
            )

    def retire(self, ids: I32, owner: int | I32) -> None:
        self.check_owner(ids, owner, "retire")
        self.owner[ids] = RETIRING
        self.num_retiring += len(ids)
        if len(ids) > 1 and len(np.unique(ids)) < len(ids):
            raise PageOwnershipError(f"{self.kind}s are retired twice in one call: {ids.tolist()}")

    def free_retired(self, ids: I32) -> None:
        self.check_owner(ids, RETIRING, "free")
        self.num_retiring -= len(ids)
        self.free_now(ids)

    def free_now(self, ids: I32) -> None:
        self.owner[ids] = FREE
        self._stack[self.num_free : self.num_free + len(ids)] = ids
        self.num_free += len(ids)

    def check(self) -> None:
        stack = self._stack[: self.num_free]
        free = np.flatnonzero(self.owner == FREE)
        if len(free) != self.num_free or not np.array_equal(np.sort(stack), free):
            raise PageOwnershipError(
                f"the stack of free {self.kind}s has {self.num_free} entries, which are not the {len(free)} "
                f"{self.kind}s without an owner"
            )
        if int((self.owner == RETIRING).sum()) != self.num_retiring:
            raise PageOwnershipError(
                f"{int((self.owner == RETIRING).sum())} {self.kind}s are retiring, {self.num_retiring} were counted"
            )


class PageAllocator:
    """The owner of every page and request-pool row. Every change of owner is a method call, which is checked.

    ``ref_counts[page]`` is the number of running requests that use a page of the cache, int32 ``[num_pages]``.
    """

    def __init__(self, num_pages: int, max_running_requests: int):
        self.pages = _OwnerTable("page", num_pages)
        self.req_pool = _OwnerTable("request-pool row", max_running_requests)
        self.ref_counts: I32 = np.zeros(num_pages, np.int32)
        self._retired: deque[tuple[int, _OwnerTable, I32]] = deque()  # (step, table, ids), by step
        self._last_read_step = -1

    @property
    def num_free(self) -> int:
        """Number of free pages: pages without an owner that no unread step touches."""
        return self.pages.num_free

    @property
    def num_retiring(self) -> int:
        """Number of retiring pages: returned by their owner, but a step whose result is unread may touch them."""
        return self.pages.num_retiring

    def allocate(self, n: int, owner: int | I32) -> I32:
        """Allocate ``n`` pages for request ``owner``, or page i for request ``owner[i]``. Return their numbers, int32.

        Raise `PageOwnershipError` if fewer than ``n`` pages are free.
        """
        return self.pages.allocate(n, owner)

    def allocate_req_pool_indices(self, owners: I32) -> I32:
        """Allocate a row of the request pool for each request in ``owners``. Return their numbers, int32.

        Raise `PageOwnershipError` if too few rows are free.
        """
        return self.req_pool.allocate(len(owners), owners)

    def retire(self, pages: I32, owner: int | I32, after: int) -> None:
        """Return pages of request ``owner``, or page i of request ``owner[i]``.

        They become free once the result of step ``after`` has been read. Launched steps up to ``after`` may still touch
        them.
        """
        self._retire(self.pages, pages, owner, after)

    def retire_req_pool_indices(self, req_pool_indices: I32, owners: I32, after: int) -> None:
        """Return request-pool row i of request ``owners[i]``. The rows become free as the pages in `retire` do."""
        self._retire(self.req_pool, req_pool_indices, owners, after)

    def _retire(self, table: _OwnerTable, ids: I32, owner: int | I32, after: int) -> None:
        table.retire(ids, owner)
        if after <= self._last_read_step:
            table.free_retired(ids)
        else:
            self._retired.append((after, table, ids))

    def free_retired(self, step: int) -> None:
        """Free the retiring pages and rows that waited for the result of ``step``, which has now been read."""
        self._last_read_step = step
        while self._retired and self._retired[0][0] <= step:
            _, table, ids = self._retired.popleft()
            table.free_retired(ids)

    def transfer_to_cache(self, pages: I32, owner: int | I32) -> None:
        """Make the prefix cache the owner of pages of request ``owner``, or of page i of request ``owner[i]``.

        Their user count starts at 0.
        """
        self.pages.check_owner(pages, owner, "transfer to the cache")
        self.pages.owner[pages] = CACHE

    def incref(self, pages: I32) -> None:
        """Count one more user of these pages of the cache; a page that is listed twice gets two users."""
        self.pages.check_owner(pages, CACHE, "add a user to")
        np.add.at(self.ref_counts, pages, 1)

    def decref(self, pages: I32) -> None:
        """Count one user fewer of these pages of the cache; a page that is listed twice loses two users."""
        self.pages.check_owner(pages, CACHE, "remove a user from")
        np.subtract.at(self.ref_counts, pages, 1)
        negative = self.ref_counts[pages] < 0
        if np.count_nonzero(negative):
            raise PageOwnershipError(f"cannot remove a user from pages {pages[negative].tolist()}: they have no users")

    def free_evicted(self, pages: I32) -> None:
        """Free evicted pages of the cache immediately: they have no users, so no unread step touches them."""
        self.pages.check_owner(pages, CACHE, "evict")
        if len(pages) and int(self.ref_counts[pages].max()) > 0:
            used = pages[self.ref_counts[pages] > 0].tolist()
            raise PageOwnershipError(f"cannot evict pages {used}: they are in use")
        self.pages.free_now(pages)

    def check(self, total_cached: int | None = None) -> None:
        """Raise `PageOwnershipError` if the records are inconsistent.

        ``total_cached`` is the number of pages that the cache says it owns; None leaves it unchecked.
        """
        self.pages.check()
        self.req_pool.check()
        cached = self.pages.owner == CACHE
        if total_cached is not None and int(cached.sum()) != total_cached:
            raise PageOwnershipError(
                f"the cache says it owns {total_cached} pages; the page allocator has recorded {int(cached.sum())}"
            )
        if (self.ref_counts[~cached] != 0).any() or (self.ref_counts < 0).any():
            raise PageOwnershipError("a page that the cache does not own has users")

    def check_idle(self, total_cached: int) -> None:
        """Raise `PageOwnershipError` unless free + cached + retiring pages are all pages, without users (promise 9)."""
        pages, req_pool = self.pages, self.req_pool
        if pages.num_free + total_cached + pages.num_retiring != pages.size:
            owners = np.unique(pages.owner[pages.owner >= 0]).tolist()
            raise PageOwnershipError(
                f"pages are lost: {pages.num_free} free + {total_cached} cached + {pages.num_retiring} retiring is not "
                f"{pages.size}; requests {owners} still own pages"
            )
        if self.ref_counts.any():
            raise PageOwnershipError(f"idle, but pages {np.flatnonzero(self.ref_counts).tolist()} have users")
        if req_pool.num_free + req_pool.num_retiring != req_pool.size:
            raise PageOwnershipError(
                f"idle, but requests own the request-pool rows {np.flatnonzero(req_pool.owner >= 0).tolist()}"
            )


def _name(owner: int) -> str:
    return {FREE: "the free ones", RETIRING: "the retiring ones", CACHE: "the cache"}.get(owner, f"request {owner}")


def _state(owner: int) -> str:
    return {FREE: "is free", RETIRING: "is retiring", CACHE: "belongs to the cache"}.get(
        owner, f"belongs to request {owner}"
    )
