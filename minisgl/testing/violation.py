"""The rules that the simulated engine checks, and the exception for a step that breaks a rule.

The exception names the rule, and the step, row, request and page where it was broken. `minisgl.testing.sim` contains
the checks.
"""

from __future__ import annotations

RULES = {
    "step-id": "Steps are numbered 0, 1, 2, … without gaps.",
    "unread-steps": "At most two launched steps are in flight with overlap, one without. Each result is read once.",
    "step-changed": "A launched Step owns its arrays: it shares no memory with the scheduler.",
    "row-shape": "Decode rows come first and compute one token; verification rows follow, and sample after each of "
    "their tokens. Every row computes at least one token, and no two rows of a step have the same req_pool_idx.",
    "table-write": "The page table is written inside its bounds, for request-pool rows and pages that exist.",
    "table-missing": "Before a step, the page table has a page for every position that the step reads or writes.",
    "admission": "An Admission gives a request a request-pool row. It names a known request and the request's sampling "
    "parameters, and the same seed whenever the request is admitted again.",
    "row-in-flight": "A request-pool row is given to another request only after the results of all steps that may "
    "still write a token to the row have been read.",
    "page-in-flight": "A page that a launched step may still access is free only after the result of that step has "
    "been read (promise 3).",
    "page-shared": "A page that a step writes is in the page table of one row only.",
    "page-retired": "A page table never points to a page that was retired or freed (promise 4).",
    "position": "A row computes only positions below the longest sequence of the engine and of the request.",
    "start": "A row starts at the position where the previous row of its request ended.",
    "input-token": "A row's input tokens are its own request's tokens, or the token sampled last for its req_pool_idx, "
    "and after it, in a verification row, draft tokens.",
    "kv-content": "A row reads exactly the KV of its own prefix (promise 8).",
    "state": "The recurrent state of a row has absorbed exactly its prefix: each token once, in order (promise 8).",
    "sample": "A row samples exactly if its last position is the newest token of its request.",
    "verify-unread": "Until the result of a verification row has been read, no step with a row of its request is "
    "launched: only the result says where the next row begins.",
    "late-sampling": "The sampling of a step with late_sampling is started once, after its launch and before the next "
    "launch. Other steps sample at their launch.",
    "mask": "Each sampled position of an open request with a grammar has the mask of the tokens that the grammar "
    "allows there, and no other position has a mask.",
    "prompt-logprobs": "The targets of a prompt range are the prompt tokens after its positions.",
    "row-after-end": "After the last token of a request was read, no step computes the request.",
}
"""The name of each rule, and the rule as a sentence."""


class SimViolation(AssertionError):  # noqa: N818 - "violation" is the term of the rules above
    """A step broke a rule of the simulated engine.

    ``rule`` is a key of `RULES`, and ``text`` says what was seen. ``step``, ``row``, ``uid``, ``req_pool_idx``,
    ``page`` and ``position`` say where; they are None if they are unknown or do not apply.
    """

    def __init__(
        self,
        rule: str,
        text: str,
        *,
        step: int | None = None,
        row: int | None = None,
        uid: int | None = None,
        req_pool_idx: int | None = None,
        page: int | None = None,
        position: int | None = None,
    ):
        self.rule, self.text = rule, text
        self.step, self.row, self.uid, self.req_pool_idx = step, row, uid, req_pool_idx
        self.page, self.position = page, position
        found = {
            "step": step,
            "row": row,
            "request": uid,
            "req_pool_idx": req_pool_idx,
            "page": page,
            "position": position,
        }
        location = ", ".join(f"{name} {value}" for name, value in found.items() if value is not None)
        super().__init__(f"[{rule}] {location}: {text}\n  The rule: {RULES[rule]}")
