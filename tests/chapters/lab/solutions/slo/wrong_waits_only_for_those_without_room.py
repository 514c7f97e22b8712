# causes: waits
# gate: room
"""Room is made as if the prompts that were granted in this step were not there: too few requests are retracted."""

REPLACED = [
    (
        "self.make_room([r for r in urgent if isinstance(r, Waiting)], running, budget)",
        "self.make_room([r for r in without_room if isinstance(r, Waiting)], running, budget)",
    ),
]
