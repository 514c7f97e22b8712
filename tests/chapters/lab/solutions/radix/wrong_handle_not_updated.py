# causes: handle
# gate: lock
"""This cache locks the upper part of a split edge, but the handle still names the lower part."""


class MyCache:
    def lock(self, handle):
        node = handle.node
        if handle.used < len(node.pages):
            node = self._split(node, handle.used)
        self._clock += 1
        while node is not None:
            if node.users == 0:
                self.evictable_pages -= len(node.pages)
            node.users += 1
            node.stamp = self._clock
            node = node.parent
