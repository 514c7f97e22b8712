"""The allocator of KV pages and request-pool rows, which records the owner of each (promise 3).

A page is in one of four states:

- free;
- owned by one request;
- owned by the prefix cache: `plugins/cache/prefix.py` moves pages to the cache, and counts their users;
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


class OwnerTable:
    """The owners of ``size`` numbered resources: pages, or request-pool rows. Every change of owner is checked.

    ``owner[i]`` is a request's uid, or FREE, RETIRING or CACHE: int32 ``[size]``. ``kind`` is the resource's name in
    error messages.
    """

    def __init__(self, kind: str, size: int):
        self.kind, self.size = kind, size
        self.owner: I32 = np.full(size, FREE, np.int32)
        self.num_free, self.num_retiring = size, 0
        self.stack: I32 = np.arange(size - 1, -1, -1, dtype=np.int32)  # the first num_free are free; the next on top
        self.last_read_step = -1
        self._retired: deque[tuple[int, I32]] = deque()  # (step, ids), by step

    def allocate(self, n: int, owner: int | I32) -> I32:
        """Allocate ``n`` of them for request ``owner``, or number i for request ``owner[i]``. Return them, int32.

        Raise `PageOwnershipError` if fewer than ``n`` are free.
        """
        if n > self.num_free:
            raise PageOwnershipError(f"{n} {self.kind}s requested, {self.num_free} free of {self.size}")
        self.num_free -= n
        ids: I32 = self.stack[self.num_free : self.num_free + n][::-1].copy()
        self.owner[ids] = owner
        return ids

    def retire(self, ids: I32, owner: int | I32, after: int) -> None:
        """Return pages or rows of request ``owner``, or number i of request ``owner[i]``.

        They become free once the result of step ``after`` has been read. Launched steps up to ``after`` may still touch
        them.
        """
        self.check_owner(ids, owner, "retire")
        self.owner[ids] = RETIRING
        self.num_retiring += len(ids)
        if len(ids) > 1 and len(np.unique(ids)) < len(ids):
            raise PageOwnershipError(f"{self.kind}s are retired twice in one call: {ids.tolist()}")
        if after <= self.last_read_step:
            self.free_retiring(ids)
        else:
            self._retired.append((after, ids))

    def free_retired(self, step: int) -> None:
        """Free the retiring ones that waited for the result of ``step``, which has now been read."""
        self.last_read_step = step
        while self._retired and self._retired[0][0] <= step:
            self.free_retiring(self._retired.popleft()[1])

    def free_retiring(self, ids: I32) -> None:
        """Free retiring ones now: no unread step touches them."""
        self.check_owner(ids, RETIRING, "free")
        self.num_retiring -= len(ids)
        self.free(ids)

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

    def free(self, ids: I32) -> None:
        """Free some, whatever their owner, which the caller has checked."""
        self.owner[ids] = FREE
        self.stack[self.num_free : self.num_free + len(ids)] = ids
        self.num_free += len(ids)


class PageAllocator(OwnerTable):
    """The owners of all pages. ``req_pool`` has those of the request-pool rows."""

    def __init__(self, num_pages: int, max_running_requests: int):
        super().__init__("page", num_pages)
        self.req_pool = OwnerTable("request-pool row", max_running_requests)

    def free_retired(self, step: int) -> None:
        """Free the retiring pages and rows that waited for the result of ``step``, which has now been read."""
        super().free_retired(step)
        self.req_pool.free_retired(step)

    def check_idle(self, total_cached: int) -> None:
        """Raise `PageOwnershipError` unless all pages are free, cached or retiring, and no row is used (promise 9)."""
        if self.num_free + total_cached + self.num_retiring != self.size:
            owners = np.unique(self.owner[self.owner >= 0]).tolist()
            raise PageOwnershipError(
                f"pages are lost: {self.num_free} free + {total_cached} cached + {self.num_retiring} retiring is not "
                f"{self.size}; requests {owners} still own pages"
            )
        rows = self.req_pool
        if rows.num_free + rows.num_retiring != rows.size:
            raise PageOwnershipError(
                f"idle, but requests own the request-pool rows {np.flatnonzero(rows.owner >= 0).tolist()}"
            )


def _name(owner: int) -> str:
    return {FREE: "the free ones", RETIRING: "the retiring ones", CACHE: "the cache"}.get(owner, f"request {owner}")


def _state(owner: int) -> str:
    return {FREE: "is free", RETIRING: "is retiring", CACHE: "belongs to the cache"}.get(
        owner, f"belongs to request {owner}"
    )
