# causes: neighbour
# gate: swap
"""The last rank sends to a rank that does not exist."""

REPLACED = [
    ("(self.rank + 1) % self.size)", "self.rank + 1)"),
]
