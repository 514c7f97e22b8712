# causes: match-long
# gate: match
"""This cache compares token ids as float32, in which 16,777,216 and 16,777,217 are the same number."""


class MyCache:
    def match(self, key):
        node, used, unlocked, found, at = self._root(key.namespace), 0, 0, [], 0
        size = self.page_size
        end = len(key.ids) // size
        while at < end:
            page = key.ids[at * size : (at + 1) * size].astype(np.float32)
            alike = [c for c in node.children.values() if (c.ids[:size].astype(np.float32) == page).all()]
            if not alike:
                break
            node, rest = alike[0], key.ids[at * size :]
            used = 0
            while used < min(len(node.pages), end - at):
                a, b = (ids[used * size : (used + 1) * size].astype(np.float32) for ids in (node.ids, rest))
                if not (a == b).all():
                    break
                used += 1
            found.append(node.pages[:used])
            unlocked += used if node.users == 0 else 0
            at += used
            if used < len(node.pages):
                break
        return MatchResult(Handle(node, used), np.concatenate(found) if found else _NONE, unlocked)
