"""This auditor keeps a state for each page, and checks all changes of state in one method."""

from collections import defaultdict
from typing import NamedTuple

from minisgl import hookimpl

FREE, HELD, SHARED = "free", "held", "shared"


class Note(NamedTuple):
    rule: str
    step: int
    uid: int | None
    page: int | None
    text: str


class Page:
    def __init__(self):
        self.state, self.by, self.busy = FREE, None, -1


class Inspector:
    def __init__(self):
        self.findings = []
        self._pages = defaultdict(Page)
        self._rows = {}
        self._open = {}
        self._newest = self._oldest_unread = -1

    def _complain(self, rule, uid, page, text):
        self.findings.append(Note(rule, self._newest, uid, page, text))

    def _change(self, number, before, after, uid=None):
        page = self._pages[number]
        if (page.state, page.by) != before:
            actor = -1 if before[1] is None else before[1]  # the number of the cache
            self._complain("owner", actor, number, f"page {number} is {page.state}, its owner is {page.by}")
            return
        page.state, page.by, page.busy = after, uid, -1 if before[1] is None else self._newest

    @hookimpl
    def minisgl_request_added(self, req):
        self._open[req.uid] = 0

    @hookimpl
    def minisgl_pages_allocated(self, owners, pages):
        for uid, number in zip(owners, pages, strict=True):
            page = self._pages[int(number)]
            if page.state != FREE:
                self._complain("owner", int(uid), int(number), f"page {number} is {page.state}")
            elif page.busy >= self._oldest_unread and page.busy >= 0:
                self._complain("in-flight", int(uid), int(number), f"step {page.busy} may still write to page {number}")
            page.state, page.by = HELD, int(uid)

    @hookimpl
    def minisgl_pages_cached(self, req, pages):
        for number in pages:
            self._change(int(number), (HELD, req.uid), SHARED)

    @hookimpl
    def minisgl_pages_evicted(self, pages):
        for number in pages:
            self._change(int(number), (SHARED, None), FREE)

    @hookimpl
    def minisgl_pages_freed(self, owner, pages):
        for number in pages:
            self._change(int(number), (HELD, owner), FREE)

    @hookimpl
    def minisgl_batch_scheduled(self, step, reqs):
        for admission in step.admissions:
            self._rows[admission.req_pool_idx] = {}
        for row, column, page in zip(*step.page_table_updates, strict=True):
            self._rows[int(row)][int(column)] = int(page)
        for req, row in zip(reqs, step.req_pool_indices, strict=True):
            for number in set(self._rows[int(row)].values()):
                page = self._pages[number]
                if page.state == FREE or page.by not in (None, req.uid):
                    self._complain("table", req.uid, number, f"request {req.uid} reads page {number}")
        if self._oldest_unread < 0:
            self._oldest_unread = step.id
        self._newest = step.id

    @hookimpl
    def minisgl_step_finished(self, result):
        self._oldest_unread = result.id + 1

    def _check_empty(self, uid):
        for number, page in self._pages.items():
            if page.by == uid:
                self._complain("leak", uid, number, f"request {uid} has ended but still owns page {number}")
                page.state, page.by = FREE, None

    @hookimpl
    def minisgl_request_retracted(self, req):
        self._check_empty(req.uid)

    @hookimpl
    def minisgl_request_finished(self, req):
        if self._open.pop(req.uid, None) is None:
            self._complain("reply", req.uid, None, f"request {req.uid} gets a second final reply")
        if req.finish_reason != "error":
            self._check_empty(req.uid)
