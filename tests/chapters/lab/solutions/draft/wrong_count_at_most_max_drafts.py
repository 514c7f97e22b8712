# causes: count
# gate: turn
"""The guess for the unread token counts against `max_drafts`."""

REPLACED = [
    ("text.copy(unread + limit)[unread:]", "text.copy(min(unread + limit, self.max_drafts))[unread:]"),
]
