"""The page allocator of prefix caches, compared with a dictionary of owners: owners, users, and forbidden calls."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from minisgl.core import I32
from minisgl.plugins.cache.prefix import SharedPageAllocator
from minisgl.scheduler.page_allocator import PageOwnershipError
from minisgl.testing.idle import check_allocator


def pages(*numbers: int) -> I32:
    return np.asarray(numbers, np.int32)


class Allocator(RuleBasedStateMachine):
    """Requests allocate and retire pages while steps are launched and read, and a cache inserts and evicts pages.

    ``owner`` is the expected owner of each page: a uid, "free", "retiring" or "cache".
    """

    @initialize(count=st.integers(1, 12))
    def start(self, count: int) -> None:
        self.allocator = SharedPageAllocator(count, 2)
        self.owner: dict[int, str | int] = dict.fromkeys(range(count), "free")
        self.users: dict[int, int] = {}  # cached page -> users
        self.retiring: dict[int, int] = {}  # page -> the step whose result must be read first
        self.launched = self.read = -1

    def of(self, owner: str | int) -> list[int]:
        return [page for page, its_owner in self.owner.items() if its_owner == owner]

    @rule(uid=st.integers(1, 3), n=st.integers(0, 5))
    def allocate(self, uid: int, n: int) -> None:
        if n > len(self.of("free")):
            with pytest.raises(PageOwnershipError, match="requested"):
                self.allocator.allocate(n, uid)
            return
        for page in self.allocator.allocate(n, uid).tolist():
            assert self.owner[page] == "free"
            self.owner[page] = uid

    @rule(uid=st.integers(1, 3), keep=st.integers(0, 2))
    def retire(self, uid: int, keep: int) -> None:
        retired = self.of(uid)[keep:]
        self.allocator.retire(pages(*retired), uid, after=self.launched)
        for page in retired:
            self.owner[page] = "retiring" if self.launched > self.read else "free"
            self.retiring[page] = self.launched

    @precondition(lambda self: self.launched - self.read < 2)
    @rule()
    def launch(self) -> None:
        self.launched += 1

    @precondition(lambda self: self.launched > self.read)
    @rule()
    def read_a_result(self) -> None:
        self.read += 1
        self.allocator.free_retired(self.read)
        for page in self.of("retiring"):
            if self.retiring[page] <= self.read:
                self.owner[page] = "free"

    @rule(uid=st.integers(1, 3), n=st.integers(0, 3))
    def transfer_to_cache(self, uid: int, n: int) -> None:
        transferred = self.of(uid)[:n]
        self.allocator.transfer_to_cache(pages(*transferred), uid)
        for page in transferred:
            self.owner[page], self.users[page] = "cache", 0

    @rule(n=st.integers(0, 4))
    def incref(self, n: int) -> None:
        used = self.of("cache")[:n]
        self.allocator.incref(pages(*used))
        for page in used:
            self.users[page] += 1

    @rule(n=st.integers(0, 4))
    def decref(self, n: int) -> None:
        used = [page for page in self.of("cache") if self.users[page]][:n]
        self.allocator.decref(pages(*used))
        for page in used:
            self.users[page] -= 1

    @rule(n=st.integers(0, 4))
    def evict(self, n: int) -> None:
        unused = [page for page in self.of("cache") if not self.users[page]][:n]
        self.allocator.free_evicted(pages(*unused))
        for page in unused:
            self.owner[page] = "free"

    @invariant()
    def counts_agree(self) -> None:
        if hasattr(self, "allocator"):
            total_cached = len(self.of("cache"))
            assert (self.allocator.num_free, self.allocator.num_retiring) == (
                len(self.of("free")),
                len(self.of("retiring")),
            )
            check_allocator(self.allocator, total_cached)
            with pytest.raises(PageOwnershipError, match="the cache says"):
                check_allocator(self.allocator, total_cached + 1)


TestAllocator = Allocator.TestCase
TestAllocator.settings = settings(
    max_examples=100, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


def example() -> SharedPageAllocator:
    """Return an allocator of 8 pages and 2 request-pool rows.

    Request 7 owns pages 0, 1 and row 0. The cache owns page 2, with one user, and page 3, without users. Page 4 retires
    after step 5. Pages 5 to 7 are free.
    """
    allocator = SharedPageAllocator(8, 2)
    allocator.allocate(2, 7)
    allocator.transfer_to_cache(allocator.allocate(2, 8), 8)
    allocator.incref(pages(2))
    allocator.retire(allocator.allocate(1, 9), 9, after=5)
    allocator.req_pool.allocate(1, 7)
    return allocator


FORBIDDEN: dict[str, tuple[Callable[[SharedPageAllocator], object], str]] = {
    "retire a page of another request": (lambda a: a.retire(pages(0), 8, 5), "belongs to request 7"),
    "retire a page of the cache": (lambda a: a.retire(pages(2), 7, 5), "belongs to the cache"),
    "retire a page twice": (lambda a: a.retire(pages(4), 9, 5), "is retiring"),
    "retire a page twice in one call": (lambda a: a.retire(pages(0, 0), 7, 5), "twice"),
    "retire a free page": (lambda a: a.retire(pages(6), 7, 5), "is free"),
    "transfer a page of another request": (lambda a: a.transfer_to_cache(pages(0), 8), "belongs to request 7"),
    "incref a page that is not cached": (lambda a: a.incref(pages(0)), "belongs to request 7"),
    "decref a page without users": (lambda a: a.decref(pages(3)), "no users"),
    "evict a page in use": (lambda a: a.free_evicted(pages(2)), "in use"),
    "evict a page that is not cached": (lambda a: a.free_evicted(pages(1)), "belongs to request 7"),
    "allocate too many pages": (lambda a: a.allocate(4, 7), "4 pages requested, 3 free"),
    "allocate too many rows": (
        lambda a: (a.req_pool.allocate(1, 1), a.req_pool.allocate(1, 2)),
        "request-pool rows requested",
    ),
    "be idle while a request owns a page": (lambda a: a.check_idle(2), "pages are lost"),
}


@pytest.mark.parametrize("call", FORBIDDEN)
def test_promise_3_forbidden_calls(call: str) -> None:
    act, message = FORBIDDEN[call]
    with pytest.raises(PageOwnershipError, match=message):
        act(example())


def test_promise_9_check_idle() -> None:
    """`check_idle` accepts free and cached pages, and rejects users and occupied request-pool rows."""
    allocator = SharedPageAllocator(4, 2)
    allocator.transfer_to_cache(allocator.allocate(3, 1), 1)
    allocator.check_idle(3)
    allocator.incref(pages(1))
    with pytest.raises(PageOwnershipError, match="users"):
        allocator.check_idle(3)
    allocator.decref(pages(1))
    allocator.req_pool.allocate(1, 5)
    with pytest.raises(PageOwnershipError, match="request-pool rows"):
        allocator.check_idle(3)
