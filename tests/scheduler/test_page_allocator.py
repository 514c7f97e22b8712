"""The page allocator: free and retiring pages, owners, and forbidden calls. Cached pages: tests/plugins/cache."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from minisgl.core import I32
from minisgl.scheduler.page_allocator import PageAllocator, PageOwnershipError


def pages(*numbers: int) -> I32:
    return np.asarray(numbers, np.int32)


FORBIDDEN: dict[str, tuple[Callable[[PageAllocator], object], str]] = {
    "retire a page of another request": (lambda a: a.retire(pages(0), 8, 5), "belongs to request 7"),
    "retire a page twice": (lambda a: a.retire(pages(2), 9, 5), "is retiring"),
    "retire a page twice in one call": (lambda a: a.retire(pages(0, 0), 7, 5), "twice"),
    "retire a free page": (lambda a: a.retire(pages(4), 7, 5), "is free"),
    "allocate too many pages": (lambda a: a.allocate(4, 7), "4 pages requested, 3 free"),
    "be idle while a request owns a page": (lambda a: a.check_idle(0), "pages are lost"),
}


@pytest.mark.parametrize("call", FORBIDDEN)
def test_promise_3_forbidden_calls(call: str) -> None:
    """Request 7 owns pages 0 and 1, page 2 retires after step 5, and pages 3 to 5 are free."""
    act, message = FORBIDDEN[call]
    allocator = PageAllocator(6, 2)
    allocator.allocate(2, 7)
    allocator.retire(allocator.allocate(1, 9), 9, after=5)
    with pytest.raises(PageOwnershipError, match=message):
        act(allocator)


def test_promise_3_retired_pages_become_free() -> None:
    """Retired pages and rows are free once the last step that was launched before has been read, and not earlier."""
    allocator = PageAllocator(4, 2)
    row = allocator.req_pool.allocate(1, 1)
    allocator.retire(allocator.allocate(4, 1), 1, after=6)
    allocator.req_pool.retire(row, 1, after=6)
    for step in (4, 5):
        allocator.free_retired(step)
        assert (allocator.num_free, allocator.num_retiring) == (0, 4)
    assert allocator.req_pool.allocate(1, 2) != row
    allocator.free_retired(6)
    assert (allocator.num_free, allocator.num_retiring) == (4, 0)
    assert allocator.req_pool.allocate(1, 3) == row


def test_promise_3_retired_after_the_step_was_read() -> None:
    """Pages are free at once if the last step that was launched before has been read already."""
    allocator = PageAllocator(4, 2)
    allocator.free_retired(6)
    allocator.retire(allocator.allocate(4, 1), 1, after=6)
    assert allocator.num_free == 4


def test_promise_9_check_idle() -> None:
    """`check_idle` accepts free pages, and rejects occupied request-pool rows."""
    allocator = PageAllocator(4, 2)
    allocator.check_idle(0)
    allocator.req_pool.allocate(1, 5)
    with pytest.raises(PageOwnershipError, match="request-pool rows"):
        allocator.check_idle(0)
