# causes: strided
# gate: sum
"""A vector is summed as it is, also if its elements are not adjacent in memory."""

REPLACED = [
    ("        whole = x.contiguous()\n", "        whole = x if x.dim() == 1 else x.contiguous()\n"),
]
