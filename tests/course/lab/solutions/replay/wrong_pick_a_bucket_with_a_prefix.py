# causes: pick
# gate: capture
"""Of two buckets with as many rows, a step gets the one that was recorded first."""

REPLACED = [
    (
        "        return min((key for key in self.recordings if key.rows >= rows), default=None)\n",
        "        fits = [key for key in self.recordings if key.rows >= rows]\n"
        "        return min(fits, key=lambda key: key.rows, default=None)\n",
    ),
]
