# causes: stored
# gate: attention
"""Keys and values of every layer are stored in layer 0."""

REPLACED = [
    ("pool, spec.index, out", "pool, 0, out"),
]
