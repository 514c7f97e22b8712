# causes: raises
# gate: clock
# seen: has no token yet
"""The method `timing` of this meter assumes that the request has a token."""

REPLACED = [
    (
        "Timing(uid, times[0] - self.arrived[uid] if times else None, gaps)",
        "Timing(uid, times[0] - self.arrived[uid], gaps)",
    ),
]
