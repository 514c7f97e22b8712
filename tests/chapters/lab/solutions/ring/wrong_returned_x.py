# causes: returned
# gate: sum
"""`all_reduce` returns x, although the sums may be in a copy."""

REPLACED = [
    ("        return whole\n", "        return x\n"),
]
