# causes: changes
# gate: turn
"""This proposer writes its guess for the unread token into the request."""


class MyProposer:
    def propose(self, reqs, positions, limits):
        drafts = []
        for req, position, limit in zip(reqs, positions, limits):
            text = self.texts[req.uid]
            unread = position - len(text.tokens)
            guesses = text.copy(unread + limit)
            req.output_ids.extend(guesses[:unread])
            drafts.append(guesses[unread:])
        return drafts
