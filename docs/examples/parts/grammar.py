"""`grammar=letters`: the answer is one of a request's choices, and each choice is one letter."""

import json
from dataclasses import dataclass

import numpy as np

from minisgl import hookimpl
from minisgl.plugins.constraint.base import Constraint
from minisgl.sampling_params import InvalidRequestError


@dataclass
class Letters:
    """Answers of one letter, as in an examination: the grammar is a list of letters."""

    def build(self, tokenizer):
        return LetterGrammars(tokenizer)


class LetterGrammars:
    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def check(self, grammar):
        letters = json.loads(grammar.text) if grammar.kind == "choice" else []
        if not letters or any(len(letter) != 1 for letter in letters):
            raise InvalidRequestError(grammar.field, "grammar=letters knows choices of one letter only.")

    def constraint(self, grammar, vocab_size, end_ids):
        allowed = [self.tokenizer.encode(letter, False)[0] for letter in json.loads(grammar.text)]
        return Examination(mask(allowed, vocab_size), mask(end_ids, vocab_size))


def mask(tokens, vocab_size):
    """Return the bits of `tokens`: int32 [ceil(vocab_size / 32)], token t is bit t % 32 of element t // 32."""
    bits = np.zeros(-(-vocab_size // 32) * 32, bool)
    bits[list(tokens)] = True
    return np.packbits(bits, bitorder="little").view(np.int32)


class Examination(Constraint):
    """The grammar of one request: first a letter, then the end."""

    def __init__(self, letter, end):
        self.following = [letter, end]

    def advance(self, tokens):
        self.following = self.following[len(tokens) :]

    def masks(self, drafts):
        following = self.following + self.following[-1:] * len(drafts)
        return np.stack(following[: 1 + len(drafts)])


@hookimpl
def minisgl_configs():
    yield "grammar", "letters", Letters
