# gate: lock
"""`lock` and `unlock` walk the path with a generator, and only `unlock` sets the time of the last use."""


class MyCache:
    def _path(self, node):
        while node is not None:
            yield node
            node = node.parent

    def lock(self, handle):
        if handle.used < len(handle.node.pages):
            handle.node = self._split(handle.node, handle.used)
        for node in self._path(handle.node):
            self.evictable_pages -= len(node.pages) if not node.users else 0
            node.users += 1

    def unlock(self, handle):
        self._clock += 1
        for node in self._path(handle.node):
            node.users -= 1
            node.stamp = self._clock
        for node in self._path(handle.node):
            if not node.users:
                self.evictable_pages += len(node.pages)
                if node.is_leaf:
                    self._offer(node)
