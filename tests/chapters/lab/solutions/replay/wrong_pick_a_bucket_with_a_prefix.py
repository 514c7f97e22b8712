# causes: pick
# gate: capture
"""If two buckets have the same number of rows, a step uses the bucket that was recorded first."""

REPLACED = [
    (
        "        return min((key for key in self.recordings if key.rows >= rows), default=None)\n",
        "        fits = [key for key in self.recordings if key.rows >= rows]\n"
        "        return min(fits, key=lambda key: key.rows, default=None)\n",
    ),
]
