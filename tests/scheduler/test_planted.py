"""Bugs that real servers had, planted into the real scheduler: each is found, by the right rule or the right book.

A test of the tests: the same workload passes on the healthy scheduler, so it is the planted bug that is seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from minisgl.core import EngineSpec, Req, SamplingParams, Step
from minisgl.scheduler.base import Budget, Plan, Running, Waiting
from minisgl.scheduler.budget import Cost
from minisgl.scheduler.ledger import PageLedger
from minisgl.scheduler.memory import Memory
from minisgl.scheduler.scheduler import Scheduler
from minisgl.testing import SimViolation
from minisgl.testing.drive import Drive, Job, make_plugin
from minisgl.testing.workloads import jobs, setups


class Hasty:
    """Everything at once, in order of arrival; it does not wait for another request's prefix."""

    def plan(self, waiting: Sequence[Waiting], running: Sequence[Running], budget: Budget) -> Plan:
        rows = [(r.uid, n) for r in running if (n := budget.grant(r, r.left or 1))]
        for w in waiting:
            if not (n := budget.grant(w, w.length - w.cached)):
                break
            rows.append((w.uid, n))
        return Plan(rows)


def run(clients: Sequence[Job], num_pages: int, cache: str = "radix", slots: int = 4, overlap: bool = True) -> Drive:
    spec = EngineSpec(page_size=4, num_pages=num_pages, max_slots=slots, max_len=64, vocab_size=50)
    drive = Drive(spec, make_plugin("cache", cache, page_size=4), Hasty(), overlap=overlap, thorough=False)
    drive.run(clients)
    return drive


def job(uid: int, length: int, answer: int = 8, arrive: int = 0, abort: int | None = None, first: int = 0) -> Job:
    """Prompts with the same ``first`` token are prefixes of each other."""
    prompt = [(first + i * i) % 50 for i in range(length)]
    return Job(uid, prompt, SamplingParams(max_tokens=answer, temperature=0.0), arrive, abort)


# ---- the bugs --------------------------------------------------------------------------------------------


def pages_freed_in_flight() -> AbstractContextManager[Any]:
    """Pages are free when they are given back, although a launched step still writes to them."""
    real = PageLedger.give

    def give(self: PageLedger, pages: Any, owner: int, after: int, slots: Any = None) -> None:
        # Slots keep their rule. The queue is in order of `after`, so the hasty ones go in front.
        if slots is not None:
            real(self, pages[:0], owner, after, slots)
        self.pages.retire(pages, owner)
        self.pages.release(pages)

    return patch.object(PageLedger, "give", give)


def slots_freed_in_flight() -> AbstractContextManager[Any]:
    """A slot is free when it is given back, although a launched step still writes its token there."""
    real = PageLedger.give

    def give(self: PageLedger, pages: Any, owner: int, after: int, slots: Any = None) -> None:
        real(self, pages, owner, after)
        if slots is not None:
            self.slots.retire(slots, owner)
            self.slots.release(slots)

    return patch.object(PageLedger, "give", give)


def duplicates_freed_before_remap() -> AbstractContextManager[Any]:
    """The pages that were computed twice are given back, and the page table still names them."""
    real = Memory._insert

    def insert(self: Memory, req: Req, ids: Any, whole: int) -> None:
        writes, row = list(self._writes), self.slots.table[req.slot].copy()
        real(self, req, ids, whole)
        self._writes, self.slots.table[req.slot] = writes, row

    return patch.object(Memory, "_insert", insert)


def double_release_on_abort() -> AbstractContextManager[Any]:
    """Both who hears of the hang-up and who ends the request give its pages back."""
    real = Scheduler.abort

    def abort(self: Scheduler, uid: int) -> None:
        req = self.open.get(uid)
        if req is not None and req.slot >= 0:
            pages = self.slots.row(req)[req.shared :]
            real(self, uid)
            self.memory.ledger.give(pages, uid, self.memory.launched)

    return patch.object(Scheduler, "abort", abort)


def admission_in_tokens() -> AbstractContextManager[Any]:
    """Admission asks whether the tokens fit, and forgets that a page is taken whole."""

    def cost(self: Memory, req: Req) -> Cost:
        return Cost((len(req) - len(self.match(req).pages) * self.spec.page_size) // self.spec.page_size, 0)

    return patch.object(Memory, "cost", cost)


def evictable_before_locked() -> AbstractContextManager[Any]:
    """What a request is about to lock is still counted as evictable for its other pages."""
    real = Memory.cost

    def cost(self: Memory, req: Req) -> Cost:
        honest = real(self, req)
        return Cost(honest.pages - self.match(req).unlocked, honest.growth)

    return patch.object(Memory, "cost", cost)


def step_shares_memory() -> AbstractContextManager[Any]:
    """A step's first positions are a view of the scheduler's own array, which goes on."""
    real = Scheduler._build

    def build(self: Scheduler, rows: Sequence[tuple[int, int]]) -> tuple[Step, list[Req]]:
        step, reqs = real(self, rows)
        first = int(step.slots[0])
        if np.array_equal(step.slots, np.arange(first, first + step.rows)):
            step = replace(step, starts=self.slots.computed[first : first + step.rows])
        return step, reqs

    return patch.object(Scheduler, "_build", build)


def unlock_forgotten() -> AbstractContextManager[Any]:
    """A request that ends leaves its prefix locked."""
    return patch.object(Memory, "done", lambda self, step: self.ledger.done(step))


def pages_lost() -> AbstractContextManager[Any]:
    """The last page of a request is forgotten when it ends."""
    real = Memory._give

    def give(self: Memory, uid: int, pages: Any, slots: Any = None) -> None:
        real(self, uid, pages[:-1] if slots is not None else pages, slots)

    return patch.object(Memory, "_give", give)


def late_token_kept() -> AbstractContextManager[Any]:
    """The token that was in flight when its request was retracted is taken for the next seat's."""
    real = Scheduler._read

    def read(self: Scheduler) -> None:
        flight = self.flights[0]
        self.flights[0] = flight._replace(seats=self.slots.seat[flight.slots])
        real(self)

    return patch.object(Scheduler, "_read", read)


def no_reserve() -> AbstractContextManager[Any]:
    """Not a bug: admission leaves no room for what runs, so that decode runs out of pages."""
    return patch.object(Memory, "LOOKAHEAD", 0)


# ---- where each shows ----------------------------------------------------------------------------------------

SPREAD = [job(1, 9), job(2, 6, first=9), job(3, 14, first=17, arrive=2), job(4, 9, first=25, arrive=3)]
HANG_UP = [job(1, 9, 12, abort=3), job(2, 9, 12, arrive=1, first=9), job(3, 13, 6, arrive=2, first=17)]
TWINS = [job(1, 12, 16), job(2, 12, 16), job(3, 17, 9, arrive=2, first=9), job(4, 13, 6, arrive=3, first=25)]
AGAIN = [job(1, 12, 4), job(2, 9, 4, arrive=9, first=9), job(3, 24, 4, arrive=9)]

CASES: dict[str, tuple[Callable[[], AbstractContextManager[Any]], dict[str, Any], str]] = {
    "pages freed while a step is in flight": (
        pages_freed_in_flight,
        {"clients": HANG_UP, "num_pages": 8, "cache": "naive"},
        "page-in-flight",
    ),
    "a slot reused while a late token write is pending": (
        slots_freed_in_flight,
        {"clients": HANG_UP, "num_pages": 20, "slots": 2},
        "slot-in-flight",
    ),
    "duplicates freed before remap": (
        duplicates_freed_before_remap,
        {"clients": TWINS, "num_pages": 30},
        "page-given-back",
    ),
    "a double release on abort": (double_release_on_abort, {"clients": HANG_UP, "num_pages": 20}, "give back page"),
    "admission that counts tokens instead of pages": (
        admission_in_tokens,
        {"clients": SPREAD, "num_pages": 9, "cache": "naive"},
        "pages wanted",
    ),
    "cached pages counted as evictable before they are locked": (
        evictable_before_locked,
        {"clients": AGAIN, "num_pages": 8},
        "pages wanted",
    ),
    "a Step that shares memory with the scheduler": (
        step_shares_memory,
        {"clients": SPREAD, "num_pages": 30},
        "step-changed",
    ),
    "a prefix that stays locked": (unlock_forgotten, {"clients": SPREAD, "num_pages": 30}, "have users"),
    "a page that nobody gives back": (pages_lost, {"clients": SPREAD, "num_pages": 30}, "pages are lost"),
    "a late token kept for another seat": (late_token_kept, {"clients": HANG_UP, "num_pages": 20}, "usage: "),
}


@contextmanager
def planted(*bugs: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    with ExitStack() as stack:
        for bug in bugs:
            stack.enter_context(bug())
        yield


@pytest.mark.parametrize("what", CASES)
def test_the_planted_bug_is_found_and_the_healthy_run_passes(what: str) -> None:
    bug, workload, message = CASES[what]
    with planted(no_reserve):
        run(**workload)
    with planted(no_reserve, bug), pytest.raises(AssertionError, match=message) as caught:
        run(**workload)
    if isinstance(caught.value, SimViolation):
        assert caught.value.rule == message


@pytest.mark.parametrize("what", CASES)
def test_random_workloads_find_the_planted_bug_too(what: str) -> None:
    runs = 0

    @settings(
        max_examples=1500,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def any_workload(data: st.DataObject) -> None:
        nonlocal runs
        runs += 1
        setup = data.draw(setups())
        spec, cache, _, options = setup.build()
        clients = data.draw(jobs(setup))
        Drive(spec, cache, Hasty(), thorough=False, **options).run(clients)

    with planted(no_reserve, CASES[what][0]), pytest.raises((AssertionError, ValueError)):
        any_workload()
    print(f"{what}: found in run {runs}")
