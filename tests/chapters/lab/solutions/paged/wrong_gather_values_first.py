# causes: gather
# gate: gather
# seen: are its values
"""`gather` returns the values before the keys."""

REPLACED = [
    ("keys, values = self.pool", "values, keys = self.pool"),
]
