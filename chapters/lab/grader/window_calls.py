"""Compares each call of `clear_behind` with what should happen, for lab `window`.

The scheduler is the real one, so the states of the table are real too. What should happen follows from the table before
the call, and from the positions that later queries read. Knows the table and the page allocator.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, NoReturn

import numpy as np

from minisgl.chapters.lab.grader.gate import Broken
from minisgl.core import I32
from minisgl.scheduler.page_allocator import FREE, RETIRING, PageOwnershipError
from minisgl.testing.kv_groups import WindowDrive

__all__ = ["Watch"]

PROMISE = "A step gives up exactly the pages that no later query of its rows, and no next turn, reads."


class Watch:
    """Takes the place of the method `clear_behind` of a drive's cache manager."""

    def __init__(self, drive: WindowDrive):
        manager: Any = drive.scheduler.cache_manager
        self.manager, self.call = manager, manager.clear_behind
        manager.clear_behind = self
        self.moved = False  # whether a call gave up any page
        self.late: Broken | None = None  # the first page that was not given up, as far as the columns show it
        self.given: list[tuple[int, int, list[int]]] = []  # (row, group, pages) that the call gives to `add_spares`
        self.add_spares, manager.add_spares = manager.add_spares, self.note_spares

    def __call__(self, rows: I32) -> None:
        table = self.manager.request_table
        before = {name: getattr(table, name).copy() for name in ("firsts", "ends", "is_cached", "tables", "num_spares")}
        spares = [[list(pages) for pages in row] for row in table.spares]
        pending, users = len(self.manager._pending_unlocks), self.manager.allocator.ref_counts.copy()
        given, late = rows.copy(), self.late
        self.given.clear()
        try:
            self.call(rows)
        except PageOwnershipError:  # the spares or the table may show what led to it
            self.check_given(rows, before)
            self.check_firsts(rows, before)
            self.late = late  # the call did not get to the other rows and groups
            raise
        if not np.array_equal(rows, given):
            self.fail("changes", "The array of rows has other numbers afterwards.")
        self.check_firsts(rows, before)
        self.check_pages(rows, before, spares, pending, users)

    def note_spares(self, row: int, group: int, pages: Any) -> None:
        """Note the pages that are to become spares, and make them spares."""
        self.given.append((int(row), int(group), [int(page) for page in pages]))
        self.add_spares(row, group, pages)

    def check_given(self, rows: I32, before: dict[str, Any]) -> None:
        """Check that no page of the cache, or of a row that is not in the step, was to become a spare."""
        for row, number, pages in self.given:
            if row not in rows.tolist():
                self.fail("other-rows", f"Row {row}, which is not in the step, was to get the spares {pages}.")
            first, end = int(before["firsts"][row, number]), int(before["ends"][row, number])
            cached = before["tables"][row, number, first:end][before["is_cached"][row, number, first:end]].tolist()
            for page in set(cached).intersection(pages):
                seen = f"Row {row}, group {number}: page {page} of the cache became a spare."
                self.fail("cached-spare", seen, row, page)

    def fail(self, cause: str, seen: str, row: int | None = None, page: int | None = None) -> NoReturn:
        """Raise `Broken`."""
        table = self.manager.request_table
        uid = None if row is None else int(table.uid[row])
        raise Broken(cause, PROMISE, seen, step=self.manager.last_launched_step, request=uid, page=page)

    def first(self, position: int, number: int) -> int:
        """Return the first column that a query at a position reads in a group."""
        window = self.manager.spec.groups[number].window
        return 0 if window < 0 else max(position - window + 1, 0) // int(self.manager.spec.page_size)

    def check_firsts(self, rows: I32, before: dict[str, Any]) -> None:
        """Check where the columns of each row and group begin."""
        table = self.manager.request_table
        in_step = set(rows.tolist())
        for row, number in np.argwhere((table.firsts != before["firsts"]) | (table.ends != before["ends"])).tolist():
            if row not in in_step or table.windows[number] < 0:
                what = "which is not in the step" if row not in in_step else f"in group {number}, which has no window"
                self.fail("other-rows", f"Row {row}, {what}, has other columns after the call.", row)
        for row in sorted(in_step):
            for number in np.flatnonzero(table.windows >= 0).tolist():
                was, now = int(before["firsts"][row, number]), int(table.firsts[row, number])
                position, size = int(table.num_computed_tokens[row]), int(self.manager.spec.page_size)
                border, window = position - position % size, int(table.windows[number])
                right = max(self.first(border, number), was)
                self.moved |= now != was
                if now == right:
                    continue
                seen = f"The next query of row {row} is at position {position}, or, in a next turn, at the border "
                seen += (
                    f"{border}. With the window {window} and pages of {size}, the first column that one of them reads "
                )
                seen += f"is {right}. `firsts` is {now} after the call, and was {was}."
                if now > right:
                    self.fail("border" if now == self.first(position, number) else "early", seen, row)
                step, uid = self.manager.last_launched_step, int(table.uid[row])
                self.late = self.late or Broken("late", PROMISE, seen, step=step, request=uid)

    def check_pages(self, rows: I32, before: dict[str, Any], spares: Any, pending: int, users: I32) -> None:
        """Check where the pages of the cleared columns are."""
        table, allocator = self.manager.request_table, self.manager.allocator
        unlocked = self.new_unlocks(pending)
        expected: Counter[int] = Counter()
        for row in rows.tolist():
            for number in range(len(table.windows)):
                first, now = int(before["firsts"][row, number]), int(table.firsts[row, number])
                pages, cached = before["tables"][row, number, first:now], before["is_cached"][row, number, first:now]
                expected.update(pages[cached].tolist())
                own = pages[~cached].tolist()
                self.check_own(row, number, own, spares[row][number], pages[cached].tolist(), unlocked)
                marks, right = table.is_cached[row, number], before["is_cached"][row, number].copy()
                right[:now] = False
                if not np.array_equal(marks, right):
                    column = int(np.flatnonzero(marks != right)[0])
                    seen = f"Row {row}, group {number}: column {column} is {'' if marks[column] else 'not '}marked "
                    self.fail(
                        "marks", f"{seen}as the cache's after the call. The first column that is read is {now}.", row
                    )
        changed = np.flatnonzero(allocator.ref_counts != users)
        if len(changed):
            page = int(changed[0])
            seen = f"Page {page} of the cache lost a user during the call, and the launched step still reads it."
            self.fail("in-flight", seen, page=page)
        for page, count in (unlocked - expected).items():
            cause = "twice" if expected[page] else "early"
            self.fail(
                cause, f"Page {page} is unlocked {expected[page] + count} times; expected {expected[page]}.", page=page
            )
        for page in expected - unlocked:
            seen = f"Page {page} of the cache is behind a window now, and nothing unlocks it."
            self.fail("locked", seen, page=page)

    def new_unlocks(self, pending: int) -> Counter[int]:
        """Return the pages that the call unlocks when the result of the step has been read."""
        found: Counter[int] = Counter()
        for step, _, pages in list(self.manager._pending_unlocks)[pending:]:
            if step < self.manager.last_launched_step:
                last = self.manager.last_launched_step
                self.fail("in-flight", f"A page is unlocked when step {step} has been read; step {last} reads it.")
            found.update(pages.tolist())
        return found

    def check_own(
        self, row: int, number: int, own: list[int], old: list[int], cached: list[int], unlocked: Counter[int]
    ) -> None:
        """Check that the request's own pages became spares, or were retired if it can't fill them."""
        table, owner = self.manager.request_table, self.manager.allocator.owner
        now, where = table.spares[row][number], f"Row {row}, group {number}: "
        for page in cached:
            if page in now or owner[page] in (FREE, RETIRING):
                self.fail("cached-spare", f"{where}page {page} of the cache became a spare.", row, page)
        for page in own:
            if unlocked[page]:
                self.fail("unlocks-own", f"{where}page {page} of the request is to be unlocked.", row, page)
            if now.count(page) > 1:
                self.fail("twice", f"{where}page {page} is in the list of spares twice.", row, page)
            if page not in now and owner[page] not in (FREE, RETIRING):
                self.fail("lost", f"{where}page {page} was in a column, and is nowhere now.", row, page)
        stranger = next((page for page in now if page not in own and page not in old), None)
        if stranger is not None:
            self.fail("early", f"{where}page {stranger} became a spare, and a later query reads it.", row, stranger)
        size = self.manager.spec.page_size
        left = max(-(-int(table.num_prefill_tokens[row]) // size) - int(table.ends[row, number]), 1)
        most = min(len(old) + len(own), left)
        if len(now) < most or int(table.num_spares[row, number]) != len(now):
            seen = f"{where}the request has {len(now)} spares, with `num_spares` {int(table.num_spares[row, number])}; "
            self.fail("spares", f"{seen}it can fill {most}.", row)
