"""Lab ledger: Who owns this page.

Grade it:  python -m minisgl.lab test ledger     (`hint ledger` for a hint)
Serve it:  python -m minisgl plugins=my_ledger.py
"""

# minisgl lab ledger, skeleton c27134ff3a (minisgl 0.2.0)

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


class MyAuditor:
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

    def move(self, pages: I32, old: int, new: int | None) -> None:
        """Pages go from their owner ``old`` to ``new`` (None: they are given back)."""
        # TODO ledger.pages
        # 1. Only its owner may hand a page on. A total would not notice who did.
        # 2. A launched step may still write to a page that its request gave back.
        raise NotImplementedError

    @hookimpl
    def minisgl_pages_allocated(self, owners: I32, pages: I32) -> None:
        """Requests took free pages."""
        # TODO ledger.pages
        # 3. Free means: nobody owns it, and no unread step touches it.
        raise NotImplementedError

    @hookimpl
    def minisgl_pages_cached(self, req: Req, pages: I32) -> None:
        """A request's pages are the cache's now."""
        # TODO ledger.pages
        # 4. Others may read them from now on: when this request ends they stay, and that is no leak.
        raise NotImplementedError

    @hookimpl
    def minisgl_pages_evicted(self, pages: I32) -> None:
        """The cache gave pages up: nobody reads them, so they may be taken at once."""
        # TODO ledger.pages
        raise NotImplementedError

    @hookimpl
    def minisgl_pages_freed(self, owner: int, pages: I32) -> None:
        """A request gave pages back."""
        # TODO ledger.pages
        raise NotImplementedError

    @hookimpl
    def minisgl_batch_scheduled(self, step: Step, reqs: Sequence[Req]) -> None:
        """A step is about to be launched."""
        # TODO ledger.steps
        # 1. Who takes a slot begins with an empty row of the table; then the step's writes take effect, in order.
        # 2. What a row names, its request reads: it must be its own, or the cache's, which any number may read.
        raise NotImplementedError

    @hookimpl
    def minisgl_step_finished(self, result: StepResult) -> None:
        """A step's result was read: it touches nothing any more."""
        # TODO ledger.steps
        raise NotImplementedError

    @hookimpl
    def minisgl_request_added(self, req: Req) -> None:
        """A request was accepted."""
        # TODO ledger.requests
        # 1. From now on it has one final reply to come.
        raise NotImplementedError

    @hookimpl
    def minisgl_request_retracted(self, req: Req) -> None:
        """A request made way for older ones."""
        # TODO ledger.requests
        # 2. That is no end: it stays open. But its pages must be back.
        raise NotImplementedError

    @hookimpl
    def minisgl_request_finished(self, req: Req) -> None:
        """A request got its final reply."""
        # TODO ledger.requests
        # 3. A client may leave before its request had a slot, while a step runs, or after a retraction: one reply each.
        # 4. Where the engine died, nobody cleans up behind it.
        raise NotImplementedError

    def leave(self, req: Req) -> None:
        """A request has no slot any more."""
        # TODO ledger.requests
        raise NotImplementedError

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
