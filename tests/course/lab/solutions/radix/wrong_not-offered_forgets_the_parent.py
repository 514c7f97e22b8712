# causes: not-offered
# gate: evict
"""When this cache evicts the last child of a node, it does not offer the node for eviction: its pages stay forever."""


class MyCache:
    def evict(self, pages):
        gone = []
        while pages > 0 and (oldest := self._leaves.pop()) is not None:
            stamp, node = oldest
            if stamp != node.stamp or not self._is_candidate(node):
                continue
            keep = max(len(node.pages) - pages, 0)
            gone.append(node.pages[keep:])
            pages -= len(gone[-1])
            if keep:
                node.ids, node.pages = node.ids[: keep * self.page_size], node.pages[:keep]
                self._offer(node)
                continue
            del node.parent.children[self._page(node.ids, 0)]
            node.parent = None
            self._nodes -= 1
        freed = np.concatenate(gone) if gone else _NONE
        self.total_pages -= len(freed)
        self.evictable_pages -= len(freed)
        return freed
