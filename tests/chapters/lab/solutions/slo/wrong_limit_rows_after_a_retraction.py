# causes: limit
# gate: room
"""After a retraction, the waiting interactive requests get rows with all of their tokens."""

REPLACED = [
    (
        "rows[request.uid] = min(wanted_tokens(request), tokens - used)",
        "rows[request.uid] = wanted_tokens(request)",
    ),
    (
        "self.grant(batch, tokens - used, budget, rows)",
        "self.grant(batch, max(tokens - used, 0), budget, rows)",
    ),
]
