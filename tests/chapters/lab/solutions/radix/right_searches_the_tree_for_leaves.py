"""`evict` searches the whole tree for the oldest leaf, so the entries of the queue are never popped."""

REPLACED = [
    (
        "while missing > 0 and (oldest := self._leaves.pop()) is not None:",
        "while missing > 0:\n            leaves = [n for n in self.nodes() if self._is_candidate(n)]\n"
        "            if not leaves:\n                break",
    ),
    (
        "            stamp, node = oldest\n            if stamp != node.stamp or not self._is_candidate(node):\n"
        "                continue\n",
        "            node = min(leaves, key=lambda leaf: leaf.stamp)\n",
    ),
]
