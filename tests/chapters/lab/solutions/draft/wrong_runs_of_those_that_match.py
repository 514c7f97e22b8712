# causes: runs
# gate: turn
"""This proposer leaves out the requests without drafts."""


class MyProposer:
    def propose(self, reqs, positions, limits):
        drafts = []
        for req, position, limit in zip(reqs, positions, limits):
            unread = position - len(self.texts[req.uid].tokens)
            guesses = self.texts[req.uid].copy(unread + limit)[unread:]
            if guesses:
                drafts.append(guesses)
        return drafts
