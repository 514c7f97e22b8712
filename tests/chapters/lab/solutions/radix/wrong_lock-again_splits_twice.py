# causes: lock-again
# gate: lock
"""A handle whose edge was split since it was locked is split again when it is locked once more."""


class MyCache:
    def lock(self, handle):
        if handle.used != len(handle.node.pages):
            handle.node = self._split(handle.node, handle.used)
        self._clock += 1
        node = handle.node
        while node is not None:
            if node.users == 0:
                self.evictable_pages -= len(node.pages)
            node.users += 1
            node.stamp = self._clock
            node = node.parent
