# causes: waits
# gate: room
"""One batch request is retracted in each step, even if an interactive request needs the room of two."""

REPLACED = [
    (
        "return budget.retractions([*urgent, *prompts, *batch])",
        "return budget.retractions([*urgent, *prompts, *batch])[:1]",
    ),
]
