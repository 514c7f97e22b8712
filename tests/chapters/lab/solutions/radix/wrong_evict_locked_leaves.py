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
            keep = max(0, len(node.pages) - pages)
            gone.append(node.pages[keep:])
            pages -= len(gone[-1])
            if keep:
                node.ids, node.pages = node.ids[: keep * self.page_size], node.pages[:keep]
                self._offer(node)
                break
            del node.parent.children[self._page(node.ids, 0)]
            self._nodes -= 1
            self._offer(node.parent)
        freed = np.concatenate(gone) if gone else _NONE
        self.total_pages -= len(freed)
        self.evictable_pages -= len(freed)
        return freed
