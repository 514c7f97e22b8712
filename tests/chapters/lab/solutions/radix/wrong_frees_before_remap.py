# causes: frees-before-remap
# gate: match
"""In this cache, `insert` returns the offered pages, even where the cache keeps an older page with the same tokens.

The request then continues with its duplicate pages, which the scheduler is about to retire.
"""


class MyCache:
    def insert(self, base, key, start, pages):
        inserted = super_insert(self, base, key, start, pages)
        return InsertResult(inserted.handle, pages.copy())


def super_insert(self, base, key, start, pages):
    node = base.node if base is not None else self._root(key.namespace)
    used = len(node.pages)
    at, end = 0, len(pages)
    ids = key.ids[start * self.page_size : (start + end) * self.page_size]
    while at < end:
        child = node.children.get(self._page(ids, at))
        if child is None:
            node = self._grow(node, ids[at * self.page_size :], pages[at:])
            used = len(node.pages)
            break
        used = self._common(child.ids, ids[at * self.page_size :])
        at += used
        if used < len(child.pages) and at < end:
            child = self._split(child, used)
        node = child
    return InsertResult(Handle(node, used), _NONE)
