# causes: misses-twice, place
# gate: pages
"""This auditor counts allocated and cached pages in total, and does not record the owner of each page."""

from typing import NamedTuple

from minisgl import hookimpl


class Finding(NamedTuple):
    rule: str
    step: int
    uid: int | None
    page: int | None
    text: str


class Totals:
    def __init__(self):
        self.findings = []
        self.allocated = self.cached = 0
        self.open = set()

    def check(self):
        if self.allocated < 0 or self.cached < 0:
            self.findings.append(Finding("total", 0, None, None, "more pages were retired than allocated"))

    @hookimpl
    def minisgl_request_added(self, req):
        self.open.add(req.uid)

    @hookimpl
    def minisgl_pages_allocated(self, owners, pages):
        self.allocated += len(pages)

    @hookimpl
    def minisgl_pages_cached(self, req, pages):
        self.allocated -= len(pages)
        self.cached += len(pages)
        self.check()

    @hookimpl
    def minisgl_pages_evicted(self, pages):
        self.cached -= len(pages)
        self.check()

    @hookimpl
    def minisgl_pages_freed(self, owner, pages):
        self.allocated -= len(pages)
        self.check()

    @hookimpl
    def minisgl_request_finished(self, req):
        self.open.remove(req.uid)
        if not self.open and self.allocated and req.finish_reason != "error":
            self.findings.append(Finding("total", 0, None, None, f"{self.allocated} pages were not retired"))
