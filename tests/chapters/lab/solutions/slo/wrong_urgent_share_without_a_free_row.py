# causes: urgent
# gate: room
# seen: No row is free
"""Tokens are kept for waiting batch prompts although no row is free."""

REPLACED = [
    ("(begun + queue if budget.rows else begun)", "begun + queue"),
]
