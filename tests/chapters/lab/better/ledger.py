"""An auditor that keeps owners and page tables in arrays. One comparison checks all pages that a step reads."""

from operator import attrgetter
from typing import NamedTuple

import numpy as np

from minisgl import hookimpl

FREE, CACHE = -2, -1
RULES = ("reply", "owner", "in-flight", "table", "leak")


class Finding(NamedTuple):
    rule: str
    step: int
    uid: int | None
    page: int | None
    text: str


def grown(array, shape, value):
    """Return ``array`` with room for the indices ``shape``. New entries are ``value``."""
    if all(index < length for index, length in zip(shape, array.shape, strict=True)):
        return array
    larger = np.full([max(2 * index, n) for index, n in zip(shape, array.shape, strict=True)], value, np.int64)
    larger[tuple(slice(n) for n in array.shape)] = array
    return larger


class MyAuditor:
    def __init__(self):
        self.findings = []
        self.open = set()
        self.owner = np.full(4096, FREE, np.int64)
        self.until = np.full(4096, -1, np.int64)
        self.table = np.full((32, 64), -1, np.int64)
        self.launched = self.read = -1

    def find(self, rule, uid, page, text):
        self.findings.append(Finding(rule, self.launched, uid, page, text))

    def fit(self, pages):
        last = int(pages.max(initial=0))
        if last < len(self.owner):
            return
        self.owner, self.until = grown(self.owner, [last], FREE), grown(self.until, [last], -1)

    def move(self, pages, old, new):
        if len(set(pages.tolist())) < len(pages):  # a page twice in one call: one after another
            for i in range(len(pages)):
                self.move(pages[i : i + 1], old, new)
            return
        self.fit(pages)
        right = self.owner[pages] == old
        for page in pages[~right].tolist():
            uid = None if old == CACHE else old
            self.find("owner", uid, page, f"{uid} transfers or frees page {page} of {self.owner[page]}")
        self.owner[pages[right]] = new
        if new == FREE:  # no request reads a page that the cache evicts
            self.until[pages[right]] = -1 if old == CACHE else self.launched

    @hookimpl
    def minisgl_pages_allocated(self, owners, pages):
        if len(set(pages.tolist())) < len(pages):
            for i in range(len(pages)):
                self.minisgl_pages_allocated(owners[i : i + 1], pages[i : i + 1])
            return
        self.fit(pages)
        taken = self.owner[pages] != FREE
        unread = ~taken & (self.until[pages] > self.read)
        for at in (taken | unread).nonzero()[0].tolist():
            rule, uid, page = "owner" if taken[at] else "in-flight", int(owners[at]), int(pages[at])
            self.find(rule, uid, page, f"request {uid} gets page {page}, which is not free")
        self.owner[pages] = owners

    @hookimpl
    def minisgl_pages_cached(self, req, pages):
        self.move(pages, req.uid, CACHE)

    @hookimpl
    def minisgl_pages_evicted(self, pages):
        self.move(pages, CACHE, FREE)

    @hookimpl
    def minisgl_pages_freed(self, owner, pages):
        self.move(pages, owner, FREE)

    @hookimpl
    def minisgl_batch_scheduled(self, step, reqs):
        rows, columns, pages = step.page_table_updates
        every = max(int(rows.max(initial=0)), int(step.req_pool_indices.max(initial=0)))
        column = int(columns.max(initial=0))
        if every >= self.table.shape[0] or column >= self.table.shape[1]:
            self.table = grown(self.table, (every, column), -1)
        for admission in step.admissions:
            self.table[admission.req_pool_idx] = -1
        self.table[rows, columns] = pages  # the last of several updates of an entry counts
        read = self.table[step.req_pool_indices]
        self.fit(read)
        owners, uids = self.owner[read], np.fromiter(map(attrgetter("uid"), reqs), np.int64)[:, None]
        wrong = (read >= 0) & (owners != CACHE) & (owners != uids)
        for row, column in zip(*wrong.nonzero(), strict=True):
            uid, page = reqs[row].uid, int(read[row, column])
            self.find("table", uid, page, f"request {uid} reads page {page} of {owners[row, column]}")
        self.launched = step.id

    @hookimpl
    def minisgl_step_finished(self, result):
        self.read = result.id

    @hookimpl
    def minisgl_request_added(self, req):
        self.open.add(req.uid)

    @hookimpl
    def minisgl_request_retracted(self, req):
        self.leave(req)

    @hookimpl
    def minisgl_request_finished(self, req):
        if req.uid not in self.open:
            self.find("reply", req.uid, None, f"request {req.uid} gets a second final reply")
        self.open.discard(req.uid)
        if req.finish_reason != "error":
            self.leave(req)

    def leave(self, req):
        for page in (self.owner == req.uid).nonzero()[0].tolist():
            self.find("leak", req.uid, page, f"request {req.uid} still owns page {page}")
            self.owner[page] = FREE

    @hookimpl
    def minisgl_metrics(self):
        lines = ["# TYPE minisgl_audit_findings counter"]
        lines += [
            f'minisgl_audit_findings_total{{rule="{rule}"}} {sum(each.rule == rule for each in self.findings)}'
            for rule in RULES
        ]
        cached = (self.owner == CACHE).sum()
        lines += ["# TYPE minisgl_audit_pages gauge", f'minisgl_audit_pages{{owner="cache"}} {cached}']
        return "\n".join(lines) + "\n"
