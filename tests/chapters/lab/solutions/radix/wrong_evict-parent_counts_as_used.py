# causes: evict-parent
# gate: evict
"""This eviction counts as a use of the parent that became a leaf."""

REPLACED = [
    (
        "            self._offer(parent)\n",
        "            parent.stamp = self._clock\n            self._offer(parent)\n",
    ),
]
