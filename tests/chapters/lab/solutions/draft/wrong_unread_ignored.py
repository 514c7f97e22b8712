# causes: unread
# gate: turn
"""This proposer gives the first guess as the first draft, also where a token is unread."""


class MyProposer:
    def propose(self, reqs, positions, limits):
        return [self.texts[req.uid].copy(limit) for req, limit in zip(reqs, limits)]
