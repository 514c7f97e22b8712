# causes: place
# gate: index
"""This index has the index of the group's last token, and not that of the token that follows."""


class Text:
    def append(self, tokens):
        for token in tokens:
            if len(self.tokens) >= self.match_tokens:
                self.after[tuple(self.tokens[-self.match_tokens :])] = len(self.tokens) - 1
            self.tokens.append(token)
