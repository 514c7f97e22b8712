"""Lab ledger: The owner of every page.

Grade it:  python -m minisgl.lab test ledger     (`hint ledger` for a hint)
Serve it:  python -m minisgl plugins=my_ledger.py
"""

# minisgl lab ledger, skeleton 38a2acab0e (minisgl 0.2.0)

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


class MyAuditor:
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

    def move(self, pages: I32, old: int, new: int | None) -> None:
        """Record that pages change from owner ``old`` to owner ``new`` (None: no owner)."""
        # TODO ledger.pages
        # 1. Only the owner may transfer a page. A count of pages would not show a transfer by another request.
        #    Such a transfer is one finding, and changes nothing: the page keeps its owner.
        # 2. A launched step may still write to a page that a request has retired.
        raise NotImplementedError

    @hookimpl
    def minisgl_pages_allocated(self, owners: I32, pages: I32) -> None:
        """Check that the allocated pages were free, and record their owners."""
        # TODO ledger.pages
        # 3. A page is free if it has no owner and was not retired, or if all steps launched before its retirement
        #    were read. A page that has an owner breaks the rule `owner` alone. In every case the request owns the
        #    page from now on.
        raise NotImplementedError

    @hookimpl
    def minisgl_pages_cached(self, req: Req, pages: I32) -> None:
        """Record that a request's pages belong to the cache now."""
        # TODO ledger.pages
        # 4. From now on any request may read these pages. They stay when this request ends, which is not a leak.
        raise NotImplementedError

    @hookimpl
    def minisgl_pages_evicted(self, pages: I32) -> None:
        """Record that the cache evicted pages. Its own are free at once: an earlier retirement of them is forgotten."""
        # TODO ledger.pages
        raise NotImplementedError

    @hookimpl
    def minisgl_pages_freed(self, owner: int, pages: I32) -> None:
        """Record that a request retired pages."""
        # TODO ledger.pages
        raise NotImplementedError

    @hookimpl
    def minisgl_batch_scheduled(self, step: Step, reqs: Sequence[Req]) -> None:
        """Apply the step's page-table updates, and check every page that its rows read."""
        # TODO ledger.steps
        # 1. An admitted request starts with an empty page-table row. Then the updates take effect, in order. An update
        #    may belong to a running request that has no row in this step.
        # 2. A request reads every page in its row, in every step. The owner must be the request or the cache. You
        #    need not check that a row names each page only once.
        raise NotImplementedError

    @hookimpl
    def minisgl_step_finished(self, result: StepResult) -> None:
        """Record that a step's result was read: the step touches no page any more."""
        # TODO ledger.steps
        raise NotImplementedError

    @hookimpl
    def minisgl_request_added(self, req: Req) -> None:
        """Record an accepted request as open."""
        # TODO ledger.requests
        # 1. An open request must get exactly one final reply.
        raise NotImplementedError

    @hookimpl
    def minisgl_request_retracted(self, req: Req) -> None:
        """Check that a retracted request owns no page."""
        # TODO ledger.requests
        # 2. A retraction is not an end: the request stays open. But it must own no pages now. Each page that it still
        #    owns is one finding; afterwards the page has no owner, so that no leak is reported twice. The gates do not
        #    allocate a leaked page again while a step is unread that was launched before the leak.
        raise NotImplementedError

    @hookimpl
    def minisgl_request_finished(self, req: Req) -> None:
        """Record a final reply, and check that the request owns no page."""
        # TODO ledger.requests
        # 3. A client may hang up while its request waits, runs, or was retracted. Each request gets exactly one reply.
        # 4. After an engine failure, the scheduler does not retire the pages of the failed requests, whose
        #    `finish_reason` is "error". These pages are no leaks. The replies count as all others.
        raise NotImplementedError

    def leave(self, req: Req) -> None:
        """Record each page that the request still owns as a leak."""
        # TODO ledger.requests
        raise NotImplementedError

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
