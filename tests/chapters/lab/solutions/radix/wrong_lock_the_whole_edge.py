# causes: lock-too-much, split-users
# gate: lock
"""This cache locks the whole edge in which a prefix ends, instead of splitting the edge at the end of the prefix."""


class MyCache:
    def lock(self, handle):
        self._clock += 1
        node = handle.node
        while node is not None:
            if node.users == 0:
                self.evictable_pages -= len(node.pages)
            node.users += 1
            node.stamp = self._clock
            node = node.parent
