# causes: scan
# gate: cost
"""This copy compares all groups of the text at once, with numpy."""

import numpy as np


class Text:
    def copy(self, count):
        n, text = self.match_tokens, np.asarray(self.tokens)
        if len(text) <= n:
            return []
        groups = np.lib.stride_tricks.sliding_window_view(text[:-1], n)
        ends = np.flatnonzero((groups == text[-n:]).all(1)) + n
        if not len(ends):
            return []
        end = int(ends[-1])
        return [int(text[end + i % (len(text) - end)]) for i in range(count)]
