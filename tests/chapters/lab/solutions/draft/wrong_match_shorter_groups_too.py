# causes: match
# gate: turn
"""This proposer drafts after the last token alone where the whole group is new."""


class MyProposer:
    def propose(self, reqs, positions, limits):
        drafts = []
        for req, position, limit in zip(reqs, positions, limits):
            text = self.texts[req.uid]
            unread = position - len(text.tokens)
            guesses = text.copy(unread + limit)
            if not guesses and text.tokens[-1] in text.tokens[:-1]:
                start = len(text.tokens) - 1 - text.tokens[-2::-1].index(text.tokens[-1])
                guesses = [text.tokens[start + i % (len(text.tokens) - start)] for i in range(unread + limit)]
            drafts.append(guesses[unread:])
        return drafts
