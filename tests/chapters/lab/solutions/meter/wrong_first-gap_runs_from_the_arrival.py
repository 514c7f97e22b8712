# causes: first-gap
# gate: clock
"""The first gap of this meter is the time from the arrival to the first token."""

REPLACED = [
    ("pairwise(times))", "pairwise([self.arrived[uid], *times]))"),
]
