# causes: lock-path, raises
# gate: lock
"""This cache counts a user only on the last node of a prefix, so the nodes before it may be evicted."""


class MyCache:
    def lock(self, handle):
        if handle.used < len(handle.node.pages):
            handle.node = self._split(handle.node, handle.used)
        self._clock += 1
        node = handle.node
        if node.users == 0:
            self.evictable_pages -= len(node.pages)
        node.users += 1
        node.stamp = self._clock

    def unlock(self, handle):
        self._clock += 1
        node = handle.node
        node.users -= 1
        node.stamp = self._clock
        if node.users == 0:
            self.evictable_pages += len(node.pages)
            self._offer(node)
