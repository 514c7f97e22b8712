"""What the simulated engine says when a step breaks a rule: which rule, and in which step, row and page.

Knows the rules by name and one sentence each; how they are checked is `minisgl.testing.sim`'s.
"""

from __future__ import annotations

RULES = {
    "step-id": "Steps are numbered 0, 1, 2, … without gaps.",
    "unread-steps": "At most two launched steps are unread with overlap, one without; a result is asked for once.",
    "step-changed": "A launched Step owns its arrays: it shares no memory with the scheduler.",
    "row-shape": "Decode rows come first and compute one token; every row computes at least one, in a slot of its own.",
    "table-write": "The page table is written inside its bounds, for slots and pages that exist.",
    "table-missing": "Before a step, the page table has a page for every position that the step touches.",
    "seat": "A slot is taken with a Seat that names a request, its own parameters and one seed for its whole life.",
    "slot-in-flight": "A slot is given to another only after every step that may still write its token was read.",
    "page-in-flight": "A page that a launched step may still touch is free only after that step was read (promise 3).",
    "page-shared": "A page that is written belongs to one row.",
    "page-given-back": "A page table never points to a page that was given back (promise 4).",
    "position": "A row stays inside the longest sequence that the engine and the request allow.",
    "start": "A row goes on where its request's last one ended.",
    "input-token": "A row's input tokens are its own request's, or the token its slot sampled last.",
    "kv-content": "A row reads exactly its own prefix (promise 8).",
    "sample": "A row samples only where its last position is the newest token of its request.",
    "row-after-end": "A request whose last token was read computes nothing more.",
}


class SimViolation(AssertionError):  # noqa: N818 - the word of the rules above
    """A step broke a rule. ``rule`` is a key of `RULES`; the other fields say where, as far as it is known."""

    def __init__(
        self,
        rule: str,
        text: str,
        *,
        step: int | None = None,
        row: int | None = None,
        uid: int | None = None,
        slot: int | None = None,
        page: int | None = None,
        position: int | None = None,
    ):
        self.rule, self.text = rule, text
        self.step, self.row, self.uid, self.slot, self.page, self.position = step, row, uid, slot, page, position
        places = {"step": step, "row": row, "request": uid, "slot": slot, "page": page, "position": position}
        where = ", ".join(f"{name} {value}" for name, value in places.items() if value is not None)
        super().__init__(f"[{rule}] {where}: {text}\n  The rule: {RULES[rule]}")
