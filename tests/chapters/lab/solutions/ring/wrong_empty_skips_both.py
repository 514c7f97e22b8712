# causes: empty
# gate: swap
"""If one of the two chunks is empty, the other is not exchanged either."""

REPLACED = [
    (
        "        sending = self.send(",
        "        if not outgoing.numel() or not incoming.numel():\n            return\n        sending = self.send(",
    ),
]
