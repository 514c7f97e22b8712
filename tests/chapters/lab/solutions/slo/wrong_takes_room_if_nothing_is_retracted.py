# causes: takes-room
# gate: room
"""Batch requests are admitted beside an interactive request without room, unless others are retracted for it."""

REPLACED = [
    (
        "            batch = [r for r in batch if isinstance(r, Running) and r.uid not in retract]\n",
        "            if retract:\n"
        "                batch = [r for r in batch if isinstance(r, Running) and r.uid not in retract]\n",
    )
]
