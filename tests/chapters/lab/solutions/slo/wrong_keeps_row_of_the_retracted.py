# causes: keeps-row
# gate: room
"""A request that is retracted keeps its row in the plan."""

REPLACED = [
    (
        "if n and uid not in retract]",
        "if n]",
    ),
]
