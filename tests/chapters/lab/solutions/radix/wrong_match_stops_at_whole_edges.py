# causes: match-short, whole-prompt
# gate: match
"""In this cache, `match` follows only edges that match completely, and ignores the equal first pages of an edge."""


class MyCache:
    def match(self, key):
        node, at, found, unlocked = self._root(key.namespace), 0, [], 0
        while at < len(key.ids) // self.page_size:
            child = node.children.get(self._page(key.ids, at))
            if child is None:
                break
            shared = self._common(child.ids, key.ids[at * self.page_size :])
            if shared < len(child.pages):
                break
            node = child
            at += shared
            found.append(child.pages)
            if not child.users:
                unlocked += shared
        return MatchResult(Handle(node, len(node.pages)), np.concatenate(found) if found else _NONE, unlocked)
