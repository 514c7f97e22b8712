# causes: scan
# gate: cost
"""This copy searches the text backwards instead of the index."""


class Text:
    def copy(self, count):
        n, text = self.match_tokens, self.tokens
        last = text[-n:]
        for end in range(len(text) - 1, n - 1, -1):
            if text[end - n : end] == last:
                return [text[end + i % (len(text) - end)] for i in range(count)]
        return []
