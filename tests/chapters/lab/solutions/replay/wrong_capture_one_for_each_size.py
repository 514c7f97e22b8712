# causes: capture
# gate: capture
"""Of two keys with as many rows, only one is recorded."""

REPLACED = [
    (
        "        for key in sorted(keys, reverse=True):\n",
        "        for key in sorted({key.rows: key for key in reversed(keys)}.values(), reverse=True):\n",
    ),
]
