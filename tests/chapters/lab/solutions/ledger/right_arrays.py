"""This auditor keeps owners in arrays that grow, and finds the row of a request in `req.req_pool_idx`."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from minisgl import hookimpl

CACHE = -1
FREE = -2


class Finding(NamedTuple):
    rule: str
    step: int
    uid: int | None
    page: int | None
    text: str


class MyAuditor:
    def __init__(self):
        self.findings = []
        self._open = {}
        self._owner = np.full(16, FREE, np.int64)
        self._until = np.full(16, -1, np.int64)
        self._rows = {}
        self.launched = self.read = -1

    @property
    def open(self):
        return frozenset(self._open)

    def grow(self, pages):
        n = int(pages.max(initial=0)) + 1
        while len(self._owner) < n:
            self._owner = np.concatenate([self._owner, np.full(len(self._owner), FREE)])
            self._until = np.concatenate([self._until, np.full(len(self._until), -1)])

    def find(self, rule, uid=None, page=None):
        self.findings.append(Finding(rule, self.launched, uid, None if page is None else int(page), rule))

    def _move(self, pages, old, new):
        self.grow(pages)
        ok = []
        seen = set()
        for p in pages.tolist():
            if self._owner[p] == old and p not in seen:
                ok.append(p)
                seen.add(p)
            else:
                self.find("owner", None if old == CACHE else old, p)
        ok = np.array(ok, np.int64)
        self._owner[ok] = new
        return ok

    @hookimpl
    def minisgl_pages_allocated(self, owners, pages):
        self.grow(pages)
        for u, p in zip(owners, pages):
            if self._owner[p] != FREE:
                self.find("owner", u, p)
            elif self._until[p] > self.read:
                self.find("in-flight", u, p)
            self._owner[p] = u
            self._until[p] = -1

    @hookimpl
    def minisgl_pages_cached(self, req, pages):
        self._move(pages, req.uid, CACHE)

    @hookimpl
    def minisgl_pages_evicted(self, pages):
        self._until[self._move(pages, CACHE, FREE)] = -1

    @hookimpl
    def minisgl_pages_freed(self, step, owner, pages):
        self._until[self._move(pages, owner, FREE)] = step

    @hookimpl
    def minisgl_batch_scheduled(self, step, reqs):
        for a in step.admissions:
            self._rows[a.req_pool_idx] = {}
        for r, c, p in zip(*step.page_table_updates):
            self._rows[int(r)][int(c)] = p
        for req in reqs:
            pages = np.array([*self._rows[req.req_pool_idx].values()], np.int64)
            self.grow(pages)
            o = self._owner[pages]
            for p in pages[(o != req.uid) & (o != CACHE)]:
                self.find("table", req.uid, p)
        self.launched = step.id

    @hookimpl
    def minisgl_step_finished(self, result):
        self.read = result.id

    @hookimpl
    def minisgl_request_added(self, req):
        self._open[req.uid] = req

    @hookimpl
    def minisgl_request_retracted(self, req):
        for p in np.flatnonzero(self._owner == req.uid):
            self.find("leak", req.uid, p)
            self._owner[p] = FREE

    @hookimpl
    def minisgl_request_finished(self, req):
        if self._open.pop(req.uid, None) is None:
            self.find("reply", req.uid)
        if req.finish_reason != "error":
            self.minisgl_request_retracted(req)

    @hookimpl
    def minisgl_metrics(self):
        return f'minisgl_audit_findings_total{{rule="owner"}} {len(self.findings)}\n'
