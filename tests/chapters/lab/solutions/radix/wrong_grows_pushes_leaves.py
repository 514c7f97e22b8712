# causes: grows
# gate: lock
"""`unlock` puts a leaf into the queue itself, so outdated entries are never removed."""

REPLACED = [
    (
        "                self.evictable_pages += len(node.pages)\n                self._offer(node)\n",
        "                self.evictable_pages += len(node.pages)\n"
        "                if node.is_leaf and node.parent is not None:\n"
        "                    self._leaves.push(node)\n",
    ),
]
