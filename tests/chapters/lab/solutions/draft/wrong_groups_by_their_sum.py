# causes: wrong, match, latest, missed, unread
# gate: turn
"""This proposer takes groups with the same sum for the same group."""


class MyProposer:
    def admitted(self, req):
        self.texts[req.uid] = ([], {})
        self.grow(req.uid, req.tokens().tolist())

    def grow(self, uid, run):
        text, after = self.texts[uid]
        for token in run:
            if len(text) >= self.match_tokens:
                after[sum(text[-self.match_tokens :])] = len(text)
            text.append(token)

    def advanced(self, reqs, tokens):
        for req, run in zip(reqs, tokens):
            self.grow(req.uid, run)

    def new_text(self):
        text = Text(self.match_tokens)
        return text

    def propose(self, reqs, positions, limits):
        drafts = []
        for req, position, limit in zip(reqs, positions, limits):
            text, after = self.texts[req.uid]
            unread = position - len(text)
            start = after.get(sum(text[-self.match_tokens :])) if len(text) >= self.match_tokens else None
            guesses = [] if start is None else [text[start + i % (len(text) - start)] for i in range(unread + limit)]
            drafts.append(guesses[unread:])
        return drafts
