# causes: match-writes
# gate: split
"""In this cache a match counts as a use: it sets the stamp of each node."""


class MyCache:
    def match(self, key):
        node = self._root(key.namespace)
        used = unlocked = 0
        found = []
        at, end = 0, len(key.ids) // self.page_size
        self._clock += 1
        while at < end:
            child = node.children.get(self._page(key.ids, at))
            if child is None:
                break
            child.stamp = self._clock
            node, used = child, self._common(child.ids, key.ids[at * self.page_size :])
            found.append(child.pages[:used])
            unlocked += used if child.users == 0 else 0
            at += used
            if used < len(child.pages):
                break
        return MatchResult(Handle(node, used), np.concatenate(found) if found else _NONE, unlocked)
