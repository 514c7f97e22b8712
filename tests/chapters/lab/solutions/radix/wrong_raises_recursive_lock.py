# causes: raises
# gate: counts
"""This cache locks a path by recursion, and fails on a path of more than a thousand nodes."""


class MyCache:
    def lock(self, handle):
        if handle.used < len(handle.node.pages):
            handle.node = self._split(handle.node, handle.used)
        self._clock += 1
        self._count(handle.node)

    def _count(self, node):
        if node is None:
            return
        self._count(node.parent)
        if node.users == 0:
            self.evictable_pages -= len(node.pages)
        node.users += 1
        node.stamp = self._clock
