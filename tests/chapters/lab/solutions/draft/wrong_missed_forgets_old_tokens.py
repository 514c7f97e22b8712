# causes: missed
# gate: cost
"""This proposer keeps the last 1,024 groups of a text."""


class Text:
    def append(self, tokens):
        for token in tokens:
            if len(self.tokens) >= self.match_tokens:
                group = tuple(self.tokens[-self.match_tokens :])
                self.after.pop(group, None)
                self.after[group] = len(self.tokens)
                if len(self.after) > 1024:
                    del self.after[next(iter(self.after))]
            self.tokens.append(token)
