"""The page allocator of a prefix cache: it also records which pages the cache owns, and how many requests use them."""

from __future__ import annotations

import numpy as np

from minisgl.core import I32
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
