# causes: many-blocks
# gate: sort
"""This sort pads an expert whose pairs fill whole blocks by one more block."""

REPLACED = [
    (
        "padding = -count % self.block\n",
        "padding = self.block - count % self.block if count else 0\n",
    ),
]
