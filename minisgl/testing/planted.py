"""Bugs that real servers had, to be planted into the real scheduler, each with a small workload that shows it.

For tests of tests: whatever judges a scheduler (the simulated engine, the trace checker, a student's auditor) is
worth something when it finds these and says nothing on the same workload without them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from minisgl.core import EngineSpec, Req, SamplingParams, Step
from minisgl.scheduler.base import Budget, Plan, Running, Waiting
from minisgl.scheduler.budget import AdmissionCost
from minisgl.scheduler.cache_manager import CacheManager
from minisgl.scheduler.page_allocator import PageAllocator
from minisgl.scheduler.scheduler import Scheduler
from minisgl.testing.drive import Drive, Job, make_plugin
from minisgl.testing.small import tight
from minisgl.testing.traced import traced

__all__ = ["PLANTED", "Hasty", "Planted", "planted"]

Bug = AbstractContextManager[Any]


class Hasty:
    """Everything at once, in order of arrival; it does not wait for another request's prefix."""

    def plan(self, waiting: Sequence[Waiting], running: Sequence[Running], budget: Budget) -> Plan:
        rows = [(r.uid, n) for r in running if (n := budget.grant(r, r.num_remaining_tokens or 1))]
        for w in waiting:
            if not (n := budget.grant(w, w.num_tokens - w.num_cached_tokens)):
                break
            rows.append((w.uid, n))
        return Plan(rows)


@dataclass(frozen=True)
class Planted:
    """``plant`` makes the context in which the bug is there. On `run`'s workload, the oracle (the simulated engine,
    the ledger or `Drive`) says ``oracle``, and the trace breaks the rule ``rule`` of `minisgl.trace.violation`."""

    plant: Callable[[], Bug]
    clients: Sequence[Job]
    num_pages: int
    oracle: str
    rule: str
    cache: str = "radix"
    slots: int = 4

    def run(self, trace: Path | None = None) -> Drive:
        """Run the workload, with the bug only inside `planted`. Raises what the oracle says."""
        spec = EngineSpec(
            page_size=4, num_pages=self.num_pages, max_running_requests=self.slots, max_seq_len=64, vocab_size=50
        )
        cache = make_plugin("cache", self.cache, page_size=4)
        with ExitStack() as stack:
            if trace is not None:
                drive = stack.enter_context(traced(trace, spec, cache, Hasty(), thorough=False))
            else:
                drive = Drive(spec, cache, Hasty(), thorough=False)
            drive.run(self.clients)
        return drive


@contextmanager
def planted(*bugs: Callable[[], Bug]) -> Iterator[None]:
    """The bugs are there; and admission leaves no room for what runs, so that decode runs out of pages."""
    with tight(), ExitStack() as stack:
        for bug in bugs:
            stack.enter_context(bug())
        yield


# ---- the bugs --------------------------------------------------------------------------------------------


def pages_freed_in_flight() -> Bug:
    """Pages are free when they are given back, although a launched step still writes to them."""
    real = PageAllocator.retire

    def give(self: PageAllocator, pages: Any, owner: int, after: int, slots: Any = None) -> None:
        # Slots keep their rule. The queue is in order of `after`, so the hasty ones go in front.
        if slots is not None:
            real(self, pages[:0], owner, after, slots)
        self.pages.retire(pages, owner)
        self.pages.free_retired(pages)

    return patch.object(PageAllocator, "give", give)


def slots_freed_in_flight() -> Bug:
    """A slot is free when it is given back, although a launched step still writes its token there."""
    real = PageAllocator.retire

    def give(self: PageAllocator, pages: Any, owner: int, after: int, slots: Any = None) -> None:
        real(self, pages, owner, after)
        if slots is not None:
            self.req_pool.retire(slots, owner)
            self.req_pool.free_retired(slots)

    return patch.object(PageAllocator, "give", give)


def duplicates_freed_before_remap() -> Bug:
    """The pages that were computed twice are given back, and the page table still names them."""
    real = CacheManager._insert

    def insert(self: CacheManager, req: Req, ids: Any, whole: int) -> None:
        writes, row = list(self._page_table_updates), self.request_table.page_table[req.req_pool_idx].copy()
        real(self, req, ids, whole)
        self._page_table_updates, self.request_table.page_table[req.req_pool_idx] = writes, row

    return patch.object(CacheManager, "_insert", insert)


def double_release_on_abort() -> Bug:
    """Both who hears of the hang-up and who ends the request give its pages back."""
    real = Scheduler.abort_request

    def abort(self: Scheduler, uid: int) -> None:
        req = self.requests.get(uid)
        if req is not None and req.req_pool_idx >= 0:
            pages = self.request_table.pages_of(req)[req.num_cached_pages :]
            real(self, uid)
            self.cache_manager._retire(uid, pages)

    return patch.object(Scheduler, "abort", abort)


def admission_in_tokens() -> Bug:
    """Admission asks whether the tokens fit, and forgets that a page is taken whole."""

    def cost(self: CacheManager, req: Req) -> AdmissionCost:
        return AdmissionCost((len(req) - len(self.match(req).pages) * self.spec.page_size) // self.spec.page_size, 0)

    return patch.object(CacheManager, "cost", cost)


def evictable_before_locked() -> Bug:
    """What a request is about to lock is still counted as evictable for its other pages."""
    real = CacheManager.admission_cost

    def cost(self: CacheManager, req: Req) -> AdmissionCost:
        honest = real(self, req)
        return AdmissionCost(honest.pages - self.match(req).unlocked, honest.growth)

    return patch.object(CacheManager, "cost", cost)


def step_shares_memory() -> Bug:
    """A step's first positions are a view of the scheduler's own array, which goes on."""
    real = Scheduler._build

    def build(self: Scheduler, rows: Sequence[tuple[int, int]]) -> tuple[Step, list[Req]]:
        step, reqs = real(self, rows)
        first = int(step.req_pool_indices[0])
        if np.array_equal(step.req_pool_indices, np.arange(first, first + step.rows)):
            step = replace(step, num_computed_tokens=self.request_table.num_computed_tokens[first : first + step.rows])
        return step, reqs

    return patch.object(Scheduler, "_build", build)


def unlock_forgotten() -> Bug:
    """A request that ends leaves its prefix locked."""
    return patch.object(CacheManager, "done", lambda self, step: self.ledger.done(step))


def pages_lost() -> Bug:
    """The last page of a request is forgotten when it ends."""
    real = CacheManager._retire

    def give(self: CacheManager, uid: int, pages: Any, slots: Any = None) -> None:
        real(self, uid, pages[:-1] if slots is not None else pages, slots)

    return patch.object(CacheManager, "_give", give)


def late_token_kept() -> Bug:
    """The token that was in flight when its request was retracted is taken for the next seat's."""
    real = Scheduler._process_result

    def read(self: Scheduler) -> None:
        flight = self.in_flight[0]
        self.in_flight[0] = flight._replace(
            admission_orders=self.request_table.admission_order[flight.req_pool_indices]
        )
        real(self)

    return patch.object(Scheduler, "_read", read)


# ---- where each shows ----------------------------------------------------------------------------------------


def job(uid: int, length: int, answer: int = 8, arrive: int = 0, abort: int | None = None, first: int = 0) -> Job:
    """Prompts with the same ``first`` token are prefixes of each other."""
    prompt = [(first + i * i) % 50 for i in range(length)]
    return Job(uid, prompt, SamplingParams(max_tokens=answer, temperature=0.0), arrive, abort)


SPREAD = [job(1, 9), job(2, 6, first=9), job(3, 14, first=17, arrive=2), job(4, 9, first=25, arrive=3)]
HANG_UP = [job(1, 9, 12, abort=3), job(2, 9, 12, arrive=1, first=9), job(3, 13, 6, arrive=2, first=17)]
TWINS = [job(1, 12, 16), job(2, 12, 16), job(3, 17, 9, arrive=2, first=9), job(4, 13, 6, arrive=3, first=25)]
AGAIN = [job(1, 12, 4), job(2, 9, 4, arrive=9, first=9), job(3, 24, 4, arrive=9)]

PLANTED: dict[str, Planted] = {
    "pages freed while a step is in flight": Planted(
        pages_freed_in_flight, HANG_UP, 8, "page-in-flight", "owner", cache="naive"
    ),
    "a slot reused while a late token write is pending": Planted(
        slots_freed_in_flight, HANG_UP, 20, "slot-in-flight", "slot", slots=2
    ),
    "duplicates freed before remap": Planted(duplicates_freed_before_remap, TWINS, 30, "page-given-back", "given-back"),
    "a double release on abort": Planted(double_release_on_abort, HANG_UP, 20, "give back page", "owner"),
    "admission that counts tokens instead of pages": Planted(
        admission_in_tokens, SPREAD, 9, "pages wanted", "admission", cache="naive"
    ),
    "cached pages counted as evictable before they are locked": Planted(
        evictable_before_locked, AGAIN, 8, "pages wanted", "admission"
    ),
    "a Step that shares memory with the scheduler": Planted(step_shares_memory, SPREAD, 30, "step-changed", "stream"),
    "a prefix that stays locked": Planted(unlock_forgotten, SPREAD, 30, "have users", "whole"),
    "a page that nobody gives back": Planted(pages_lost, SPREAD, 30, "pages are lost", "whole"),
    "a late token kept for another seat": Planted(late_token_kept, HANG_UP, 20, "usage: ", "reply"),
}
"""What each bug is, in words → where it shows."""
