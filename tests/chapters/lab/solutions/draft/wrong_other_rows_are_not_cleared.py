# causes: other, wrong, leak, missed, latest, run, match
# gate: turn
"""This proposer knows requests by their rows, and adds to what an earlier request left there."""


class MyProposer:
    def admitted(self, req):
        text = self.texts.setdefault(req.req_pool_idx, self.new_text())
        del text.tokens[:]
        text.append(req.tokens().tolist())

    def advanced(self, reqs, tokens):
        for req, run in zip(reqs, tokens):
            self.texts[req.req_pool_idx].append(run)

    def removed(self, req):
        pass

    def propose(self, reqs, positions, limits):
        drafts = []
        for req, position, limit in zip(reqs, positions, limits):
            text = self.texts[req.req_pool_idx]
            unread = position - len(text.tokens)
            start = text.after.get(tuple(text.tokens[-self.match_tokens :]))
            ok = start is not None and start < len(text.tokens)
            drafts.append(text.copy(unread + limit)[unread:] if ok else [])
        return drafts
