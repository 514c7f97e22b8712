# causes: unlocked
# gate: match
"""This cache counts all matched pages as unlocked."""


class MyCache:
    def match(self, key):
        node = self._root(key.namespace)
        used = 0
        found = []
        at, end = 0, len(key.ids) // self.page_size
        while at < end:
            child = node.children.get(self._page(key.ids, at))
            if child is None:
                break
            node, used = child, self._common(child.ids, key.ids[at * self.page_size :])
            found.append(child.pages[:used])
            at += used
            if used < len(child.pages):
                break
        return MatchResult(Handle(node, used), np.concatenate(found) if found else _NONE, at)
