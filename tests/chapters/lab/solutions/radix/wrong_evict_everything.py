# causes: evict-many
# gate: evict
"""This cache evicts all pages without users, however few were asked for."""


class MyCache:
    def evict(self, pages):
        evicted = []
        while (oldest := self._leaves.pop()) is not None:
            stamp, node = oldest
            if stamp != node.stamp or not self._is_candidate(node):
                continue
            evicted.append(node.pages)
            parent = node.parent
            del parent.children[self._page(node.ids, 0)]
            node.parent = None
            self._nodes -= 1
            self._offer(parent)
        result = np.concatenate(evicted) if evicted else _NONE
        self.total_pages -= len(result)
        self.evictable_pages -= len(result)
        return result
