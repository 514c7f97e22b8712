# causes: reused
# gate: multiply
"""`multiply` keeps one output for each shape of the rows, and every layer writes to it."""

REPLACED = [
    ("        self.block = block\n", "        self.block = block\n        self.outputs = {}\n"),
    (
        "        return torch.cat(done) if done else rows\n",
        "        kept = self.outputs.setdefault(rows.shape, torch.empty_like(rows))\n"
        "        return kept.copy_(torch.cat(done)) if done else rows\n",
    ),
]
