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
            keep = max(0, len(node.pages) - (pages - sum(map(len, gone))))
            gone.append(node.pages[keep:])
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
