"""An observer that keeps books of its own: who owns each page, who reads it, and who still waits for a final reply.

It believes nothing that the scheduler says of itself; it follows each change of owner and says where promises 1, 3, 4
and 9 are broken. It listens where it is asked to: ``plugins=minisgl.plugins.observer.auditor``. Each step costs a look
at every page that it reads, so it is for finding faults and not for measuring.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from minisgl import hookimpl
from minisgl.core import I32, Req, Step, StepResult

CACHE = -1  # as an owner, beside the uids of requests

RULES = {
    "reply": "Every request ends with exactly one final reply (promise 1).",
    "owner": "A page is taken when nobody owns it, and handed on or given back by its owner (promise 3).",
    "in-flight": "A page that was given back is taken only after every step launched before was read (promise 3).",
    "table": "A request's page table names its own pages and the cache's, and none that was given back (promise 4).",
    "leak": "A request that has ended, or waits again, owns no page (promise 9).",
}


class Finding(NamedTuple):
    """A broken rule (a key of `RULES`), after which step was launched, and whom and which page it concerns."""

    rule: str
    step: int
    uid: int | None
    page: int | None
    text: str


class Auditor:
    """``findings`` holds what was found, ``open`` the requests that have no final reply yet."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []
        self.open: set[int] = set()
        self.owner: dict[int, int] = {}  # page -> a request's uid, or CACHE; a page that nobody owns is not here
        self.until: dict[int, int] = {}  # page that was given back -> the last step that may touch it
        self.table: dict[int, dict[int, int]] = {}  # slot -> column -> page
        self.launched = self.read = -1  # the last step that was

    def find(self, rule: str, text: str, uid: int | None = None, page: int | None = None) -> None:
        """Note a broken rule; the first ones are printed."""
        finding = Finding(rule, self.launched, uid, page, text)
        self.findings.append(finding)
        if len(self.findings) <= 20:
            print(f"audit [{rule}] after step {self.launched}: {text}", file=sys.stderr, flush=True)

    def whose(self, page: int) -> str:
        """A page's owner, in words."""
        owner = self.owner.get(page)
        return "nobody's" if owner is None else "the cache's" if owner == CACHE else f"request {owner}'s"

    # lab: ledger.pages
    def move(self, pages: I32, old: int, new: int | None) -> None:
        """Pages go from their owner ``old`` to ``new`` (None: they are given back)."""
        for page in pages.tolist():
            # 1. Only its owner may hand a page on. A total would not notice who did.
            if self.owner.get(page) != old:
                who = "the cache" if old == CACHE else f"request {old}"
                self.find("owner", f"{who} hands on page {page}, which is {self.whose(page)}", old, page)
            elif new is not None:
                self.owner[page] = new
            else:
                del self.owner[page]
                # 2. A launched step may still write to a page that its request gave back.
                if old != CACHE:
                    self.until[page] = self.launched

    @hookimpl
    def minisgl_pages_allocated(self, owners: I32, pages: I32) -> None:
        """Requests took free pages."""
        for uid, page in zip(owners.tolist(), pages.tolist(), strict=True):
            # 3. Free means: nobody owns it, and no unread step touches it.
            if page in self.owner:
                self.find("owner", f"request {uid} takes page {page}, which is {self.whose(page)}", uid, page)
            elif self.until.get(page, -1) > self.read:
                self.find("in-flight", f"request {uid} takes page {page}: step {self.until[page]} is unread", uid, page)
            self.owner[page] = uid

    @hookimpl
    def minisgl_pages_cached(self, req: Req, pages: I32) -> None:
        """A request's pages are the cache's now."""
        # 4. Others may read them from now on: when this request ends they stay, and that is no leak.
        self.move(pages, req.uid, CACHE)

    @hookimpl
    def minisgl_pages_evicted(self, pages: I32) -> None:
        """The cache gave pages up: nobody reads them, so they may be taken at once."""
        self.move(pages, CACHE, None)

    @hookimpl
    def minisgl_pages_freed(self, owner: int, pages: I32) -> None:
        """A request gave pages back."""
        self.move(pages, owner, None)

    # lab: end

    # lab: ledger.steps
    @hookimpl
    def minisgl_batch_scheduled(self, step: Step, reqs: Sequence[Req]) -> None:
        """A step is about to be launched."""
        # 1. Who takes a slot begins with an empty row of the table; then the step's writes take effect, in order.
        for seat in step.admissions:
            self.table[seat.req_pool_idx] = {}
        for slot, column, page in zip(*(part.tolist() for part in step.page_table_updates), strict=True):
            self.table.setdefault(slot, {})[column] = page
        for req, slot in zip(reqs, step.req_pool_indices.tolist(), strict=True):
            # 2. What a row names, its request reads: it must be its own, or the cache's, which any number may read.
            for page in self.table.get(slot, {}).values():
                if self.owner.get(page) not in (req.uid, CACHE):
                    self.find("table", f"request {req.uid} reads page {page}, {self.whose(page)}", req.uid, page)
        self.launched = step.id

    @hookimpl
    def minisgl_step_finished(self, result: StepResult) -> None:
        """A step's result was read: it touches nothing any more."""
        self.read = result.id

    # lab: end

    # lab: ledger.requests
    @hookimpl
    def minisgl_request_added(self, req: Req) -> None:
        """A request was accepted."""
        # 1. From now on it has one final reply to come.
        self.open.add(req.uid)

    @hookimpl
    def minisgl_request_retracted(self, req: Req) -> None:
        """A request made way for older ones."""
        # 2. That is no end: it stays open. But its pages must be back.
        self.leave(req)

    @hookimpl
    def minisgl_request_finished(self, req: Req) -> None:
        """A request got its final reply."""
        # 3. A client may leave before its request had a slot, while a step runs, or after a retraction: one reply each.
        if req.uid not in self.open:
            self.find("reply", f"request {req.uid} gets a second final reply", req.uid)
        self.open.discard(req.uid)
        # 4. Where the engine died, nobody cleans up behind it.
        if req.finish_reason != "error":
            self.leave(req)

    def leave(self, req: Req) -> None:
        """A request has no slot any more."""
        for page in [page for page, owner in self.owner.items() if owner == req.uid]:
            self.find("leak", f"request {req.uid} left, and page {page} is still its own", req.uid, page)
            del self.owner[page]

    # lab: end

    @hookimpl
    def minisgl_metrics(self) -> str:
        """Findings by rule, open requests, and pages by owner."""
        found = Counter(finding.rule for finding in self.findings)
        cached = sum(owner == CACHE for owner in self.owner.values())
        lines = ["# TYPE minisgl_audit_findings counter"]
        lines += [f'minisgl_audit_findings_total{{rule="{rule}"}} {found[rule]}' for rule in RULES]
        lines += ["# TYPE minisgl_audit_open_requests gauge", f"minisgl_audit_open_requests {len(self.open)}"]
        lines += ["# TYPE minisgl_audit_pages gauge", f'minisgl_audit_pages{{owner="cache"}} {cached}']
        lines += [f'minisgl_audit_pages{{owner="requests"}} {len(self.owner) - cached}']
        return "\n".join(lines) + "\n"
