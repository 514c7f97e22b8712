# causes: impure
# gate: rows
"""This policy looks at the priority of a request once, and keeps its class."""

REPLACED = [
    (
        "        self.interactive, self.step_tokens, self.batch_share = interactive, step_tokens, batch_share",
        "        self.interactive, self.step_tokens, self.batch_share = interactive, step_tokens, batch_share\n"
        "        self.classes: dict[int, bool] = {}",
    ),
    (
        "        return request.priority <= self.interactive",
        "        return self.classes.setdefault(request.uid, request.priority <= self.interactive)",
    ),
]
