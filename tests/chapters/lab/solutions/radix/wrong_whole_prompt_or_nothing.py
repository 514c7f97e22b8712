# causes: whole-prompt, match-short
# gate: match
"""In this cache, `match` returns nothing unless the whole prompt is cached; a shared beginning is not found."""


class MyCache:
    def match(self, key):
        node, at, found, unlocked = self._root(key.namespace), 0, [], 0
        pages = len(key.ids) // self.page_size
        while at < pages:
            child = node.children.get(self._page(key.ids, at))
            if child is None or self._common(child.ids, key.ids[at * self.page_size :]) < len(child.pages):
                return MatchResult(Handle(self._root(key.namespace), 0), _NONE, 0)
            node = child
            at += len(child.pages)
            found.append(child.pages)
            unlocked += 0 if child.users else len(child.pages)
        return MatchResult(Handle(node, len(node.pages)), np.concatenate(found) if found else _NONE, unlocked)
