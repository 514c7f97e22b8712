# causes: alone
# gate: sum
"""With one rank, a tensor that is not contiguous is copied."""

REPLACED = [
    (
        "        if self.size == 1:\n            return x\n",
        "        if self.size == 1:\n            return x.contiguous()\n",
    ),
]
