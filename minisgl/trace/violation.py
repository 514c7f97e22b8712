"""The rules that the trace checker verifies, and the error that reports a broken rule.

`RULES` gives each rule a name, the promise it belongs to, and a sentence. `minisgl.trace.check` verifies the rules.
"""

from __future__ import annotations

RULES: dict[str, tuple[str, str]] = {
    "reply": ("promise 1", "Every request ends with exactly one final reply, and gains no token after it."),
    "invalid-request": ("promise 2", "A request that can never be served is refused before it is queued."),
    "page-owner": (
        "promise 3",
        "A page has one owner; a retired page is free only after every step launched before was read.",
    ),
    "request-pool": (
        "promise 3",
        "A request-pool row has one owner; it gets a new owner only after every step with a row in it was read.",
    ),
    "page-table": ("promise 4", "A page table never points to a page that was retired or freed."),
    "admission": ("promise 5", "Admission counts whole pages, and never over-commits."),
    "retraction": (
        "promise 5",
        "When pages run out, the least urgent request is retracted, never the most urgent: by priority, then by age.",
    ),
    "starvation": (
        "promise 6",
        "A request that was left out for starvation_steps steps is in the next plan in which it fits beside the "
        "running requests that arrived before it.",
    ),
    "row": (
        "promise 8",
        "A row continues where its request's last row ended, and samples when it computes the last known token.",
    ),
    "prefix": ("promise 8", "A row reads the KV of exactly its own prefix."),
    "state": ("promise 8", "A row goes on with the recurrent state that has absorbed exactly its own prefix."),
    "late-token": (
        "promise 8",
        "A token that was in flight when its request was retracted or ended is discarded; all others are kept.",
    ),
    "page-count": (
        "promise 9",
        "Free, cached, retiring and owned pages add up to all pages; when idle, no request uses a page.",
    ),
    "stream": (
        "stream rule",
        "Steps take effect in order, few are in flight, and a launched Step never changes.",
    ),
}


class Violation(AssertionError):  # noqa: N818 - a verdict on a run
    """A broken rule of `RULES`. The attributes are None where they do not apply.

    ``line`` is the line of the trace file, or 0 if it is not known.
    """

    def __init__(
        self,
        rule: str,
        text: str,
        *,
        step: int | None = None,
        uid: int | None = None,
        req_pool_idx: int | None = None,
        page: int | None = None,
    ):
        self.rule, self.text = rule, text
        self.promise, self.sentence = RULES[rule]
        self.step, self.uid, self.req_pool_idx, self.page = step, uid, req_pool_idx, page
        self.line = 0  # set by the function that reads the events

    @property
    def location(self) -> str:
        """``step 3, request 2, page 7``, without the parts that are not known."""
        parts = {"step": self.step, "request": self.uid, "request-pool row": self.req_pool_idx, "page": self.page}
        return ", ".join(f"{name} {value}" for name, value in parts.items() if value is not None)

    def __str__(self) -> str:
        line = f" (line {self.line})" if self.line else ""
        return f"{self.promise} is broken at {self.location}{line}: {self.text}\n  {self.promise}: {self.sentence}"
