# causes: returns
# gate: copy
"""Without a match, `copy` returns None instead of an empty list."""


class Text:
    def copy(self, count):
        start = self.after.get(tuple(self.tokens[-self.match_tokens :]))
        if start is not None:
            return [self.tokens[start + i % (len(self.tokens) - start)] for i in range(count)]
