# causes: raises, other, wrong, missed
# gate: turn
"""This proposer has room for sixteen requests."""


class MyProposer:
    def __init__(self, max_drafts, match_tokens):
        self.max_drafts, self.match_tokens = max_drafts, match_tokens
        self.rows = [self.new_text() for _ in range(16)]

    def admitted(self, req):
        self.rows[req.req_pool_idx] = self.new_text()
        self.rows[req.req_pool_idx].append(req.tokens().tolist())

    def advanced(self, reqs, tokens):
        for req, run in zip(reqs, tokens):
            self.rows[req.req_pool_idx].append(run)

    def removed(self, req):
        self.rows[req.req_pool_idx] = self.new_text()

    def propose(self, reqs, positions, limits):
        drafts = []
        for req, position, limit in zip(reqs, positions, limits):
            text = self.rows[req.req_pool_idx]
            unread = position - len(text.tokens)
            drafts.append(text.copy(unread + limit)[unread:])
        return drafts
