# causes: changes
# gate: turn
"""This proposer adds the unread tokens to the scheduler's own list of limits."""


class MyProposer:
    def propose(self, reqs, positions, limits):
        drafts = []
        for i, req in enumerate(reqs):
            text = self.texts[req.uid]
            unread = positions[i] - len(text.tokens)
            limits[i] += unread
            drafts.append(text.copy(limits[i])[unread:])
        return drafts
