# causes: waits
# gate: room
"""Requests are retracted for several interactive requests, and only the first of these has a row."""

REPLACED = [
    ("for request in without_room if retract else []:", "for request in without_room[:1] if retract else []:"),
]
