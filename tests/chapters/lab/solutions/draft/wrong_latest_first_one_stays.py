# causes: latest
# gate: index
"""This text keeps the first occurrence of a group."""


class Text:
    def append(self, tokens):
        for token in tokens:
            if len(self.tokens) >= self.match_tokens:
                self.after.setdefault(tuple(self.tokens[-self.match_tokens :]), len(self.tokens))
            self.tokens.append(token)
