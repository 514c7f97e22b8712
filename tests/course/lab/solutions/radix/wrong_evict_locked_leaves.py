# causes: evict-locked
# gate: evict
"""This cache evicts the oldest leaf without checking whether the leaf has users."""


class MyCache:
    def evict(self, pages):
        gone = []
        while pages > 0:
            leaves = [n for n in self.nodes() if n.is_leaf]
            if not leaves:
                break
            node = min(leaves, key=lambda n: n.stamp)
            gone.append(node.pages)
            pages -= len(node.pages)
            del node.parent.children[self._page(node.ids, 0)]
            self._nodes -= 1
            self._offer(node.parent)
        freed = np.concatenate(gone) if gone else _NONE
        self.total_pages -= len(freed)
        self.evictable_pages -= len(freed)
        return freed
