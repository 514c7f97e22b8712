# causes: largest-first
# gate: capture
# seen: without `shared_prefix`
"""Of two buckets with as many rows, the smaller one is recorded first."""

REPLACED = [
    (
        "for key in sorted(keys, reverse=True):",
        "for key in sorted(keys, key=lambda key: key.rows, reverse=True):",
    ),
]
