"""Checks that a scheduler without work holds nothing, and that the records of its page allocator agree."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from minisgl.scheduler.page_allocator import CACHE, FREE, RETIRING, OwnerTable, PageAllocator, PageOwnershipError

if TYPE_CHECKING:
    from minisgl.scheduler.scheduler import Scheduler

__all__ = ["check_allocator", "check_idle"]


def check_idle(scheduler: Scheduler) -> None:
    """Raise AssertionError unless no request is open, no step is in flight and the KV pool is whole (promise 9)."""
    assert not scheduler.requests, f"requests are open: {sorted(scheduler.requests)}"
    assert not scheduler.in_flight, f"steps are in flight: {[launched.step.id for launched in scheduler.in_flight]}"
    manager = scheduler.cache_manager
    if (cache := getattr(manager, "cache", None)) is not None:
        cache.check()
    check_allocator(manager.allocator, manager.page_counts()[1])
    manager.check_idle()


def check_allocator(allocator: PageAllocator, total_cached: int) -> None:
    """Raise `PageOwnershipError` if the records are inconsistent; ``total_cached`` is the cache's own count."""
    _check_table(allocator)
    _check_table(allocator.req_pool)
    cached = allocator.owner == CACHE
    if int(cached.sum()) != total_cached:
        raise PageOwnershipError(
            f"the cache says it owns {total_cached} pages; the page allocator has recorded {int(cached.sum())}"
        )
    users = getattr(allocator, "ref_counts", np.zeros_like(allocator.owner))  # those of a `SharedPageAllocator`
    if (users[~cached] != 0).any() or (users < 0).any():
        raise PageOwnershipError("a page that the cache does not own has users")


def _check_table(table: OwnerTable) -> None:
    stack, free = table.stack[: table.num_free], np.flatnonzero(table.owner == FREE)
    if len(free) != table.num_free or not np.array_equal(np.sort(stack), free):
        raise PageOwnershipError(
            f"the stack of free {table.kind}s has {table.num_free} entries, which are not the {len(free)} "
            f"{table.kind}s without an owner"
        )
    retiring = int((table.owner == RETIRING).sum())
    if retiring != table.num_retiring:
        raise PageOwnershipError(f"{retiring} {table.kind}s are retiring, {table.num_retiring} were counted")
