# causes: circulated
# gate: sum
"""The finished chunks stay where they are."""

REPLACED = [
    ("        self.circulate(chunks)\n        return whole", "        return whole"),
]
