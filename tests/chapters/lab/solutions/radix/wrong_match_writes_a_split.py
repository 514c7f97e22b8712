# causes: match-writes
# gate: match
"""`match` splits the edge at the end of the prefix."""


class MyCache:
    def match(self, key):
        node, used, at, found, unlocked = self._root(key.namespace), 0, 0, [], 0
        while at < len(key.ids) // self.page_size:
            child = node.children.get(self._page(key.ids, at))
            if child is None:
                break
            used = self._common(child.ids, key.ids[at * self.page_size :])
            node = child if used == len(child.pages) else self._split(child, used)
            found.append(node.pages)
            unlocked += used if node.users == 0 else 0
            at += used
        return MatchResult(Handle(node, used), np.concatenate(found) if found else _NONE, unlocked)
