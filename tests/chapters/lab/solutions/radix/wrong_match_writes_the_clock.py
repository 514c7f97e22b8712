# causes: match-writes, evict-order
# gate: evict
"""In this cache, `match` updates the time of last use, so prefixes that are only looked up stay in the cache."""


class MyCache:
    def match(self, key):
        self._clock += 1
        node, used, at, found, unlocked = self._root(key.namespace), 0, 0, [], 0
        while at < len(key.ids) // self.page_size:
            child = node.children.get(self._page(key.ids, at))
            if child is None:
                break
            node, used = child, self._common(child.ids, key.ids[at * self.page_size :])
            node.stamp = self._clock
            self._offer(node)
            found.append(child.pages[:used])
            unlocked += used if child.users == 0 else 0
            at += used
            if used < len(child.pages):
                break
        return MatchResult(Handle(node, used), np.concatenate(found) if found else _NONE, unlocked)
