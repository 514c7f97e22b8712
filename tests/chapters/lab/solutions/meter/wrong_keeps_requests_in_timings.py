# causes: keeps
# gate: kept
"""Each timing in `ended` refers to its request, which holds all tokens of the prompt."""

REPLACED = [
    (
        "    gaps: tuple[float, ...]  # inter",
        "    gaps: tuple[float, ...]\n    req: object = None  # inter",
    ),
    (
        "self.ended.append(self.timing(req.uid))",
        "self.ended.append(self.timing(req.uid)._replace(req=req))",
    ),
]
