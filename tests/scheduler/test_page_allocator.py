"""The page ledger against a dictionary of owners: what is free, whose is what, and what nobody may do."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from minisgl.core import I32
from minisgl.scheduler.page_allocator import PageAllocator, PageOwnershipError


def pages(*numbers: int) -> I32:
    return np.asarray(numbers, np.int32)


class Ledger(RuleBasedStateMachine):
    """Requests take and give pages while steps are launched and read, and a cache adopts and evicts some."""

    @initialize(count=st.integers(1, 12))
    def start(self, count: int) -> None:
        self.ledger = PageAllocator(count, 2)
        self.owner: dict[int, str | int] = dict.fromkeys(range(count), "free")
        self.users: dict[int, int] = {}
        self.retiring: dict[int, int] = {}  # page -> the step to be read first
        self.launched = self.read = -1

    def of(self, owner: str | int) -> list[int]:
        return [page for page, who in self.owner.items() if who == owner]

    @rule(who=st.integers(1, 3), want=st.integers(0, 5))
    def take(self, who: int, want: int) -> None:
        if want > len(self.of("free")):
            with pytest.raises(PageOwnershipError, match="wanted"):
                self.ledger.allocate(want, who)
            return
        for page in self.ledger.allocate(want, who).tolist():
            assert self.owner[page] == "free"
            self.owner[page] = who

    @rule(who=st.integers(1, 3), keep=st.integers(0, 2))
    def give(self, who: int, keep: int) -> None:
        mine = self.of(who)[keep:]
        self.ledger.retire(pages(*mine), who, after=self.launched)
        for page in mine:
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
        self.ledger.free_retired(self.read)
        for page in self.of("retiring"):
            if self.retiring[page] <= self.read:
                self.owner[page] = "free"

    @rule(who=st.integers(1, 3), some=st.integers(0, 3))
    def adopt(self, who: int, some: int) -> None:
        mine = self.of(who)[:some]
        self.ledger.transfer_to_cache(pages(*mine), who)
        for page in mine:
            self.owner[page], self.users[page] = "cache", 0

    @rule(some=st.integers(0, 4))
    def use(self, some: int) -> None:
        shared = self.of("cache")[:some]
        self.ledger.incref(pages(*shared))
        for page in shared:
            self.users[page] += 1

    @rule(some=st.integers(0, 4))
    def leave(self, some: int) -> None:
        shared = [page for page in self.of("cache") if self.users[page]][:some]
        self.ledger.decref(pages(*shared))
        for page in shared:
            self.users[page] -= 1

    @rule(some=st.integers(0, 4))
    def evict(self, some: int) -> None:
        unused = [page for page in self.of("cache") if not self.users[page]][:some]
        self.ledger.free_evicted(pages(*unused))
        for page in unused:
            self.owner[page] = "free"

    @invariant()
    def counts_agree(self) -> None:
        if hasattr(self, "ledger"):
            held = len(self.of("cache"))
            assert (self.ledger.num_free, self.ledger.num_retiring) == (len(self.of("free")), len(self.of("retiring")))
            self.ledger.check(held)
            with pytest.raises(PageOwnershipError, match="holds"):
                self.ledger.check(held + 1)


TestLedger = Ledger.TestCase
TestLedger.settings = settings(
    max_examples=100, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


def book() -> PageAllocator:
    """Pages 0 and 1 are request 7's, 2 is the cache's with one user, 3 the cache's without, 4 retires after step 5, and
    5 to 7 are free; slot 0 is request 7's."""
    ledger = PageAllocator(8, 2)
    ledger.allocate(2, 7)
    ledger.transfer_to_cache(ledger.allocate(2, 8), 8)
    ledger.incref(pages(2))
    ledger.retire(ledger.allocate(1, 9), 9, after=5)
    ledger.allocate_req_pool_idx(7)
    return ledger


FORBIDDEN: dict[str, tuple[Callable[[PageAllocator], object], str]] = {
    "giving what another owns": (lambda book: book.retire(pages(0), 8, 5), "request 7's"),
    "giving what the cache owns": (lambda book: book.retire(pages(2), 7, 5), "the cache's"),
    "giving twice": (lambda book: book.retire(pages(4), 9, 5), "retiring"),
    "giving one page twice in one call": (lambda book: book.retire(pages(0, 0), 7, 5), "twice"),
    "giving what is free": (lambda book: book.retire(pages(6), 7, 5), "free"),
    "adopting what another owns": (lambda book: book.transfer_to_cache(pages(0), 8), "request 7's"),
    "using what the cache does not own": (lambda book: book.incref(pages(0)), "request 7's"),
    "leaving what one does not use": (lambda book: book.decref(pages(3)), "did not use"),
    "evicting what is in use": (lambda book: book.free_evicted(pages(2)), "in use"),
    "evicting what the cache does not own": (lambda book: book.free_evicted(pages(1)), "request 7's"),
    "taking too many": (lambda book: book.allocate(4, 7), "4 pages wanted, 3 free"),
    "taking a slot too many": (
        lambda book: (book.allocate_req_pool_idx(1), book.allocate_req_pool_idx(2)),
        "slots wanted",
    ),
    "being idle while someone owns a page": (lambda book: book.check_idle(2), "pages are lost"),
}


@pytest.mark.parametrize("what", FORBIDDEN)
def test_promise_3_what_nobody_may_do_to_a_page(what: str) -> None:
    act, message = FORBIDDEN[what]
    with pytest.raises(PageOwnershipError, match=message):
        act(book())


def test_promise_3_what_was_given_back_is_free_once_the_steps_launched_before_were_read() -> None:
    ledger = PageAllocator(4, 2)
    slot = ledger.allocate_req_pool_idx(1)
    ledger.retire(ledger.allocate(4, 1), 1, after=6, slots=pages(slot))
    for step in (4, 5):
        ledger.free_retired(step)
        assert (ledger.num_free, ledger.num_retiring) == (0, 4)
    assert ledger.allocate_req_pool_idx(2) != slot
    ledger.free_retired(6)
    assert (ledger.num_free, ledger.num_retiring) == (4, 0)
    assert ledger.allocate_req_pool_idx(3) == slot


def test_promise_3_what_is_given_back_after_its_steps_were_read_is_free_at_once() -> None:
    ledger = PageAllocator(4, 2)
    ledger.free_retired(6)
    ledger.retire(ledger.allocate(4, 1), 1, after=6)
    assert ledger.num_free == 4


def test_promise_9_idle_books_are_in_order() -> None:
    ledger = PageAllocator(4, 2)
    ledger.transfer_to_cache(ledger.allocate(3, 1), 1)
    ledger.check_idle(3)
    ledger.incref(pages(1))
    with pytest.raises(PageOwnershipError, match="users"):
        ledger.check_idle(3)
    ledger.decref(pages(1))
    ledger.allocate_req_pool_idx(5)
    with pytest.raises(PageOwnershipError, match="slots"):
        ledger.check_idle(3)
