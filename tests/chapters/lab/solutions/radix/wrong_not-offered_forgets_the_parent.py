# causes: not-offered
# gate: evict
"""When this cache evicts the last child of a node, it does not offer the node for eviction: its pages stay forever."""

REPLACED = [
    (
        "            self._offer(parent)\n",
        "",
    ),
]
