# causes: other, wrong, latest
# gate: turn
"""This proposer indexes the tokens of all requests in one dict, so a request is continued with another's tokens."""


class MyProposer:
    def admitted(self, req):
        self.texts[req.uid] = req.tokens().tolist()
        self.groups = getattr(self, "groups", {})
        self.note(self.texts[req.uid], self.match_tokens)

    def note(self, tokens, first):
        for i in range(max(first, self.match_tokens), len(tokens)):
            self.groups[tuple(tokens[i - self.match_tokens : i])] = (tokens, i)

    def advanced(self, reqs, tokens):
        for req, run in zip(reqs, tokens):
            text = self.texts[req.uid]
            text.extend(run)
            self.note(text, len(text) - len(run))

    def propose(self, reqs, positions, limits):
        drafts = []
        for req, position, limit in zip(reqs, positions, limits):
            text = self.texts[req.uid]
            unread = position - len(text)
            found = self.groups.get(tuple(text[-self.match_tokens :]))
            if found is None:
                drafts.append([])
            else:
                source, start = found
                guesses = [source[start + i % (len(source) - start)] for i in range(unread + limit)]
                drafts.append(guesses[unread:])
        return drafts
