# causes: match-long
# gate: match
"""In this cache, `match` compares only the first page of an edge, so it may return the KV of another prompt."""


class MyCache:
    def match(self, key):
        node, used, at, found, unlocked = self._root(key.namespace), 0, 0, [], 0
        pages = len(key.ids) // self.page_size
        while at < pages:
            child = node.children.get(self._page(key.ids, at))
            if child is None:
                break
            node, used = child, min(len(child.pages), pages - at)
            found.append(child.pages[:used])
            unlocked += 0 if child.users else used
            at += used
        return MatchResult(Handle(node, used), np.concatenate(found) if found else _NONE, unlocked)
