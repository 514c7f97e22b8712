# causes: itself
# gate: index
"""This text indexes a group when it is complete, before a token follows it."""


class Text:
    def append(self, tokens):
        for token in tokens:
            self.tokens.append(token)
            if len(self.tokens) >= self.match_tokens:
                self.after[tuple(self.tokens[-self.match_tokens :])] = len(self.tokens)
