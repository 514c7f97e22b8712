# causes: evict-middle
# gate: evict
"""This cache evicts the oldest node without users, even if the node has children."""


class MyCache:
    def evict(self, pages):
        gone = []
        unused = sorted((n for n in self.nodes() if n.users == 0), key=lambda n: n.stamp)
        for node in unused:
            if sum(map(len, gone)) >= pages:
                break
            gone.append(node.pages)
            del node.parent.children[self._page(node.ids, 0)]
            self._nodes -= 1
            self._offer(node.parent)
        freed = np.concatenate(gone) if gone else _NONE
        self.total_pages -= len(freed)
        self.evictable_pages -= len(freed)
        return freed
