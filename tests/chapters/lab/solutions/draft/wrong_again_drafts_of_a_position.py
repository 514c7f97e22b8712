# causes: again, wrong, unread, missed, latest, few, match, leak
# gate: turn
"""Drafts are kept by position and limit, although the token before the position was unread and may be another one."""


class MyProposer:
    def propose(self, reqs, positions, limits):
        self.kept = getattr(self, "kept", {})
        runs = []
        for req, position, limit in zip(reqs, positions, limits, strict=True):
            text = self.texts[req.uid]
            unread = position - len(text.tokens)
            if self.kept.get(req.uid, (0, 0))[:2] != (position, limit):
                self.kept[req.uid] = position, limit, text.copy(limit + unread)[unread:]
            runs.append(list(self.kept[req.uid][2]))
        return runs

    def removed(self, req):
        del self.texts[req.uid]
        getattr(self, "kept", {}).pop(req.uid, None)
