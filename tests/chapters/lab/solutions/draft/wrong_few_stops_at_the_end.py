# causes: few, missed
# gate: copy
"""This copy stops at the end of the text."""


class Text:
    def copy(self, count):
        start = self.after.get(tuple(self.tokens[-self.match_tokens :]))
        return [] if start is None else self.tokens[start : start + count]
