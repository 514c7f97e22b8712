# causes: users-flag
# gate: lock
"""In this cache, `users` is 0 or 1, so the first unlock of a prefix removes the locks of all its users."""


class MyCache:
    def lock(self, handle):
        if handle.used < len(handle.node.pages):
            handle.node = self._split(handle.node, handle.used)
        self._clock += 1
        node = handle.node
        while node is not None:
            if node.users == 0:
                self.evictable_pages -= len(node.pages)
            node.users, node.stamp = 1, self._clock
            node = node.parent

    def unlock(self, handle):
        self._clock += 1
        node = handle.node
        while node is not None:
            if node.users:
                self.evictable_pages += len(node.pages)
            node.users, node.stamp = 0, self._clock
            self._offer(node)
            node = node.parent
