"""What the checker says when a trace breaks a promise: which one, and at which step, request and page.

Knows the rules by name, each with the number of its promise and a sentence; how they are checked is `check`'s.
"""

from __future__ import annotations

RULES: dict[str, tuple[str, str]] = {
    "reply": ("promise 1", "Every request ends with exactly one final reply, and gains nothing after it."),
    "refused": ("promise 2", "What can never be served is refused before it is queued."),
    "owner": (
        "promise 3",
        "A page has one owner; given back, it is free only after every step launched before was read.",
    ),
    "slot": ("promise 3", "A slot has one owner; it is another's only after every step with a row in it was read."),
    "given-back": ("promise 4", "A page table never points to a page that was given back."),
    "admission": ("promise 5", "Admission counts whole pages, and never over-commits."),
    "retraction": ("promise 5", "When pages run out, the youngest request is retracted, never the oldest."),
    "starved": ("promise 6", "Whoever was left out for starvation_steps steps takes part in the next one."),
    "row": ("promise 8", "A row goes on where its request's last one ended, and samples at its newest token."),
    "prefix": ("promise 8", "A row reads exactly its own prefix."),
    "late-token": ("promise 8", "A token in flight when its request lost its seat is discarded; any other is kept."),
    "whole": ("promise 9", "Free, cached, retiring and owned pages are all pages; idle, nobody uses any."),
    "stream": ("stream rule", "Steps take effect in order, few are unread, and a launched Step never changes."),
}


class Violation(AssertionError):  # noqa: N818 - a verdict on a run
    """A trace breaks a rule. The attributes are None where they do not apply."""

    def __init__(
        self,
        rule: str,
        text: str,
        *,
        step: int | None = None,
        uid: int | None = None,
        slot: int | None = None,
        page: int | None = None,
    ):
        self.rule, self.text = rule, text
        self.promise, self.sentence = RULES[rule]
        self.step, self.uid, self.slot, self.page = step, uid, slot, page
        self.line = 0  # of the file; filled in by who reads it

    @property
    def where(self) -> str:
        """``step 3, request 2, page 7``, as far as known."""
        places = {"step": self.step, "request": self.uid, "slot": self.slot, "page": self.page}
        return ", ".join(f"{name} {value}" for name, value in places.items() if value is not None)

    def __str__(self) -> str:
        line = f" (line {self.line})" if self.line else ""
        return f"{self.promise} is broken at {self.where}{line}: {self.text}\n  {self.promise}: {self.sentence}"
