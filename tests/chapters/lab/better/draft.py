"""Goes on copying from the same place after a wrong guess, and learns what replaces a token.

It drafts more tokens the more of them were right.
"""

from dataclasses import dataclass


@dataclass
class Mine:
    """Other drafts with ``drafting=own``."""

    max_drafts: int = 8
    match_tokens: int = 3
    drafting: str = "rules"

    def build(self):
        proposer = MyProposer(self.max_drafts, self.match_tokens)
        proposer.kind = Copied if self.drafting == "own" else Text
        return proposer


class Copied:
    """A text, and the place from which its end is copied, with the number of tokens that were right since.

    ``names`` has the last tokens that came instead of one at the place, and how often in a row.
    """

    def __init__(self, match_tokens):
        self.tokens, self.after, self.names = [], {}, {}
        self.place, self.right, self.wrong = None, 0, 0

    def append(self, tokens):
        for token in tokens:
            if self.place is not None:
                old = self.tokens[self.place]
                name, times = self.names.get(old, (old, 2))
                is_right = token in (old, name)
                if token == old:
                    self.names.pop(old, None)
                else:
                    self.names[old] = token, times + 1 if token == name else 1
                self.right, self.wrong = (self.right + 1, 0) if is_right else (0, self.wrong + 1)
                self.place = None if self.wrong > 2 else self.place + 1
            for size in (2, 3):
                if len(self.tokens) >= size:
                    self.after[tuple(self.tokens[-size:])] = len(self.tokens)
            self.tokens.append(token)
            if self.place is None or self.right < 2:
                found = [(self.after.get(tuple(self.tokens[-size:])), size) for size in (3, 2)]
                place, size = next((each for each in found if each[0] not in (None, len(self.tokens))), (None, 0))
                if place not in (None, self.place):
                    self.place, self.right, self.wrong = place, size, 0

    def copy(self, count):
        guesses, tokens = [], self.tokens
        for i in range(min(count, 1 + self.right) if self.place is not None else 0):
            old = tokens[self.place + i % (len(tokens) - self.place)]
            name, times = self.names.get(old, (old, 2))
            guesses.append(name if times > 1 else old)
        return guesses


class MyProposer:
    def new_text(self):
        return self.kind(self.match_tokens)
