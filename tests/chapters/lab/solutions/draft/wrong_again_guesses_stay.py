# causes: again, changes, wrong, few, missed, run, latest, unread
# gate: turn
"""This proposer appends its drafts to the text, as if they were right."""


class MyProposer:
    def propose(self, reqs, positions, limits):
        drafts = []
        for req, position, limit in zip(reqs, positions, limits):
            text = self.texts[req.uid]
            unread = max(position - len(text.tokens), 0)
            guesses = text.copy(unread + limit)
            text.append(guesses)
            drafts.append(guesses[unread:])
        return drafts
