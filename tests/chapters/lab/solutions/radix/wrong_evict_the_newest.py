# causes: evict-order
# gate: evict
"""This cache evicts the most recently used leaf first instead of the least recently used one."""


class MyCache:
    def evict(self, pages):
        gone = []
        while pages > 0:
            leaves = [n for n in self.nodes() if n.users == 0 and n.is_leaf]
            if not leaves:
                break
            node = max(leaves, key=lambda n: n.stamp)
            keep = max(len(node.pages) - pages, 0)
            gone.append(node.pages[keep:])
            pages -= len(gone[-1])
            if keep:
                node.ids, node.pages = node.ids[: keep * self.page_size], node.pages[:keep]
            else:
                del node.parent.children[self._page(node.ids, 0)]
                self._nodes -= 1
                self._offer(node.parent)
        freed = np.concatenate(gone) if gone else _NONE
        self.total_pages -= len(freed)
        self.evictable_pages -= len(freed)
        return freed
