# causes: few
# gate: copy
"""This copy never gives more than eight guesses."""


class Text:
    def copy(self, count):
        start = self.after.get(tuple(self.tokens[-self.match_tokens :]))
        if start is None:
            return []
        return [self.tokens[start + i % (len(self.tokens) - start)] for i in range(min(count, 8))]
