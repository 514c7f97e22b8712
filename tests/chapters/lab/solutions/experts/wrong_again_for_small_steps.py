# causes: again
# gate: counts
"""In small steps, each block is multiplied separately, so an expert with two blocks is read twice."""

REPLACED = [
    (
        "        for expert, expert_rows in enumerate(rows.split(list(counts))):\n",
        "        parts = [*enumerate(rows.split(list(counts)))]\n"
        "        if len(rows) <= 64:\n"
        "            parts = [(expert, block) for expert, part in parts for block in part.split(self.block)]\n"
        "        for expert, expert_rows in parts:\n",
    ),
]
