# causes: newest, lost
# gate: kept
"""A full `ended` takes no timing without a token."""

REPLACED = [
    (
        "        self.ended.append(self.timing(req.uid))",
        "        timing = self.timing(req.uid)\n"
        "        if len(self.ended) < KEPT or timing.ttft is not None:\n"
        "            self.ended.append(timing)",
    ),
]
