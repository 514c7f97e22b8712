# causes: grows
# gate: whole
"""The rows of all steps are kept."""

REPLACED = [
    ("        self.block = block\n", "        self.block = block\n        self.history = []\n"),
    ("        done = []\n", "        done = []\n        self.history.append(rows)\n"),
]
