"""An observer that checks promises 1, 3, 4 and 9: it records every page owner, page table and final reply itself.

The auditor follows each change of owner from the events, and does not use the scheduler's own records. In each step it
checks every page that a row reads. This is slow, so the auditor is meant for finding bugs and not for benchmarks. Load
this plugin with ``plugins=minisgl.plugins.observer.auditor``.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from minisgl import hookimpl
from minisgl.core import I32, Req, Step, StepResult  # I32: a numpy array of int32

CACHE = -1  # the owner of cached pages; every other owner is the uid of a request

RULES = {
    "reply": "Every request ends with exactly one final reply (promise 1).",
    "owner": "A page is allocated only while it is free, and only its owner transfers or retires it (promise 3).",
    "in-flight": "A retired page is allocated again only after the steps launched before were read (promise 3).",
    "table": "A request's page table names only pages of that request and of the cache (promise 4).",
    "leak": "A request that has ended or was retracted owns no page (promise 9).",
}


class Finding(NamedTuple):
    """A broken rule: a key of `RULES`, the last launched step, and the request and the page concerned.

    ``step`` is -1 before the first step. In ``minisgl_batch_scheduled``, the step before and the step itself are both
    right. ``uid`` is the request that gets, transfers, retires, reads or keeps the page, or that gets the reply. If the
    cache evicts the page, ``uid`` is None or `CACHE`. ``page`` is None for a reply.
    """

    rule: str
    step: int
    uid: int | None
    page: int | None
    text: str


class Auditor:
    """Records the findings in ``findings``. ``open`` holds the uids of requests without a final reply."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []
        self.open: set[int] = set()
        self.owner: dict[int, int] = {}  # page -> uid of a request, or CACHE; a page without an owner has no entry
        self.until: dict[int, int] = {}  # retired page -> the last step that may touch the page
        self.table: dict[int, dict[int, int]] = {}  # req_pool_idx -> column -> page
        self.launched = self.read = -1  # the last step that was launched, and the last whose result was read

    def find(self, rule: str, text: str, uid: int | None = None, page: int | None = None) -> None:
        """Record a broken rule. The first 20 findings are also printed to standard error."""
        finding = Finding(rule, self.launched, uid, page, text)
        self.findings.append(finding)
        if len(self.findings) <= 20:
            print(f"audit [{rule}] after step {self.launched}: {text}", file=sys.stderr, flush=True)

    def whose(self, page: int) -> str:
        """Return the owner of a page in words."""
        owner = self.owner.get(page)
        return "free" if owner is None else "owned by the cache" if owner == CACHE else f"owned by request {owner}"

    # lab: ledger.pages
    def move(self, pages: I32, old: int, new: int | None) -> None:
        """Record that pages change from owner ``old`` to owner ``new`` (None: no owner)."""
        for page in pages.tolist():
            # 1. Only the owner may transfer a page. A count of pages would not show a transfer by another request.
            #    Such a transfer is one finding, and changes nothing: the page keeps its owner.
            if self.owner.get(page) != old:
                giver = "the cache" if old == CACHE else f"request {old}"
                uid = None if old == CACHE else old
                self.find("owner", f"{giver} transfers or frees page {page}, which is {self.whose(page)}", uid, page)
            elif new is not None:
                self.owner[page] = new
            else:
                del self.owner[page]
                # 2. A launched step may still write to a page that a request has retired.
                self.until[page] = -1 if old == CACHE else self.launched

    @hookimpl
    def minisgl_pages_allocated(self, owners: I32, pages: I32) -> None:
        """Check that the allocated pages were free, and record their owners."""
        for uid, page in zip(owners.tolist(), pages.tolist(), strict=True):
            # 3. A page is free if it has no owner and was not retired, or if all steps launched before its retirement
            #    were read. A page that has an owner breaks the rule `owner` alone. In every case the request owns the
            #    page from now on.
            if page in self.owner:
                self.find("owner", f"request {uid} gets page {page}, which is {self.whose(page)}", uid, page)
            elif self.until.get(page, -1) > self.read:
                self.find(
                    "in-flight", f"request {uid} gets page {page}, but step {self.until[page]} is unread", uid, page
                )
            self.owner[page] = uid

    @hookimpl
    def minisgl_pages_cached(self, req: Req, pages: I32) -> None:
        """Record that a request's pages belong to the cache now."""
        # 4. From now on any request may read these pages. They stay when this request ends, which is not a leak.
        self.move(pages, req.uid, CACHE)

    @hookimpl
    def minisgl_pages_evicted(self, pages: I32) -> None:
        """Record that the cache evicted pages. Its own are free at once: an earlier retirement of them is forgotten."""
        self.move(pages, CACHE, None)

    @hookimpl
    def minisgl_pages_freed(self, owner: int, pages: I32) -> None:
        """Record that a request retired pages."""
        self.move(pages, owner, None)

    # lab: end

    # lab: ledger.steps
    @hookimpl
    def minisgl_batch_scheduled(self, step: Step, reqs: Sequence[Req]) -> None:
        """Apply the step's page-table updates, and check every page that its rows read."""
        # 1. An admitted request starts with an empty page-table row. Then the updates take effect, in order. An update
        #    may belong to a running request that has no row in this step.
        for admission in step.admissions:
            self.table[admission.req_pool_idx] = {}
        for row, column, page in zip(*(part.tolist() for part in step.page_table_updates), strict=True):
            self.table.setdefault(row, {})[column] = page
        for req, row in zip(reqs, step.req_pool_indices.tolist(), strict=True):
            # 2. A request reads every page in its row, in every step. The owner must be the request or the cache. You
            #    need not check that a row names each page only once.
            for page in self.table.get(row, {}).values():
                if self.owner.get(page) not in (req.uid, CACHE):
                    self.find(
                        "table", f"request {req.uid} reads page {page}, which is {self.whose(page)}", req.uid, page
                    )
        self.launched = step.id

    @hookimpl
    def minisgl_step_finished(self, result: StepResult) -> None:
        """Record that a step's result was read: the step touches no page any more."""
        self.read = result.id

    # lab: end

    # lab: ledger.requests
    @hookimpl
    def minisgl_request_added(self, req: Req) -> None:
        """Record an accepted request as open."""
        # 1. An open request must get exactly one final reply.
        self.open.add(req.uid)

    @hookimpl
    def minisgl_request_retracted(self, req: Req) -> None:
        """Check that a retracted request owns no page."""
        # 2. A retraction is not an end: the request stays open. But it must own no pages now. Each page that it still
        #    owns is one finding; afterwards the page has no owner, so that no leak is reported twice. The gates do not
        #    allocate a leaked page again while a step is unread that was launched before the leak.
        self.leave(req)

    @hookimpl
    def minisgl_request_finished(self, req: Req) -> None:
        """Record a final reply, and check that the request owns no page."""
        # 3. A client may hang up while its request waits, runs, or was retracted. Each request gets exactly one reply.
        if req.uid not in self.open:
            self.find("reply", f"request {req.uid} gets a second final reply", req.uid)
        self.open.discard(req.uid)
        # 4. After an engine failure, the scheduler does not retire the pages of the failed requests, whose
        #    `finish_reason` is "error". These pages are no leaks. The replies count as all others.
        if req.finish_reason != "error":
            self.leave(req)

    def leave(self, req: Req) -> None:
        """Record each page that the request still owns as a leak."""
        for page in [page for page, owner in self.owner.items() if owner == req.uid]:
            self.find(
                "leak", f"request {req.uid} has no request-pool row any more, but still owns page {page}", req.uid, page
            )
            del self.owner[page]

    # lab: end

    @hookimpl
    def minisgl_metrics(self) -> str:
        """Return the number of findings by rule, of open requests, and of pages by owner."""
        counts = Counter(finding.rule for finding in self.findings)
        cached = sum(owner == CACHE for owner in self.owner.values())
        lines = ["# TYPE minisgl_audit_findings counter"]
        lines += [f'minisgl_audit_findings_total{{rule="{rule}"}} {counts[rule]}' for rule in RULES]
        lines += ["# TYPE minisgl_audit_open_requests gauge", f"minisgl_audit_open_requests {len(self.open)}"]
        lines += ["# TYPE minisgl_audit_pages gauge", f'minisgl_audit_pages{{owner="cache"}} {cached}']
        lines += [f'minisgl_audit_pages{{owner="requests"}} {len(self.owner) - cached}']
        return "\n".join(lines) + "\n"
