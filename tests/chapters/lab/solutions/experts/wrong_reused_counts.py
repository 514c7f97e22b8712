# causes: reused
# gate: sort
"""`sort` returns the same list of counts in each call."""

REPLACED = [
    ("        self.block = block\n", "        self.block = block\n        self.counts = []\n"),
    (
        "        pairs, counts = [], []\n",
        "        pairs, counts = [], self.counts\n        counts.clear()\n",
    ),
]
