"""The buckets are recorded in the order of their sizes as text, in which 8 is larger than 64."""

# causes: largest-first
# gate: capture

REPLACED = [
    (
        "sorted(keys, reverse=True)",
        "sorted(keys, key=lambda key: str(key.rows), reverse=True)",
    ),
]
