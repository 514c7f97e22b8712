"""Let no answer have a digit: forbid all tokens with one, beside what a grammar forbids."""

from minisgl import hookimpl
from minisgl.plugins.constraint.base import Constraint, mask_of


class NoDigits(Constraint):
    def __init__(self, grammar, mask):
        self.grammar, self.mask = grammar, mask

    def advance(self, tokens):
        if self.grammar is not None:
            self.grammar.advance(tokens)

    def is_ready(self, seconds=0.0):
        return self.grammar is None or self.grammar.is_ready(seconds)

    def masks(self, drafts):
        if self.grammar is not None:
            return self.grammar.masks(drafts) & self.mask
        return self.mask[None].repeat(1 + len(drafts), axis=0)


class Digits:
    mask = None  # made for the first request: it reads the text of every token

    @hookimpl
    def minisgl_wrap_constraint(self, req, vocab_size, tokenizer):
        if tokenizer is None:
            return None
        if self.mask is None:
            texts = (tokenizer.token_bytes(token).decode(errors="replace") for token in range(vocab_size))
            self.mask = mask_of((i for i, text in enumerate(texts) if not any(map(str.isdigit, text))), vocab_size)
        return lambda grammar: NoDigits(grammar, self.mask)
