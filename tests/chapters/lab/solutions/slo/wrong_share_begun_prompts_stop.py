# causes: share, idle
# gate: room
"""While an interactive request waits for room, no batch prompt gets tokens, also none that has begun."""

REPLACED = [
    ("batch = [r for r in batch if isinstance(r, Running) and r.uid not in retract]", "batch = []"),
]
