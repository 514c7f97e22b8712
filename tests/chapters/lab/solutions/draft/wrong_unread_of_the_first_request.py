# causes: unread
# gate: turn
"""Only the first request of a call is asked whether it has an unread token."""

REPLACED = [
    (
        "            unread = position - len(text.tokens)\n",
        "            unread = positions[0] - len(self.texts[reqs[0].uid].tokens)\n",
    )
]
