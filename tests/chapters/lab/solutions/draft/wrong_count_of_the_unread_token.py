# causes: count
# gate: turn
"""The guess for the unread token counts as one of the drafts, so there is one draft too few."""


class MyProposer:
    def propose(self, reqs, positions, limits):
        drafts = []
        for req, position, limit in zip(reqs, positions, limits, strict=True):
            text = self.texts[req.uid]
            drafts.append(text.copy(limit)[position - len(text.tokens) :])
        return drafts
