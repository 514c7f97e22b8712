# causes: page-size
# gate: evict
"""When this cache shortens a leaf, it keeps as many token ids as pages, which is right only if a page is one token."""

import numpy as np


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
            self.total_pages -= len(gone[-1])
            self.evictable_pages -= len(gone[-1])
            if keep:
                node.ids, node.pages = node.ids[:keep], node.pages[:keep]
                self._offer(node)
                continue
            del node.parent.children[self._page(node.ids, 0)]
            self._nodes -= 1
            parent, node.parent = node.parent, None
            self._offer(parent)
        return np.concatenate(gone) if gone else np.empty(0, np.int32)
