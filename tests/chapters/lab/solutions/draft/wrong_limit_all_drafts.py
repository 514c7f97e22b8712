# causes: limit
# gate: turn
"""This proposer returns as many drafts as its option says."""


class MyProposer:
    def propose(self, reqs, positions, limits):
        drafts = []
        for req, position in zip(reqs, positions):
            unread = position - len(self.texts[req.uid].tokens)
            drafts.append(self.texts[req.uid].copy(unread + self.max_drafts)[unread:])
        return drafts
