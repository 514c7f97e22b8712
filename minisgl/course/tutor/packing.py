"""From conversations to rows of tokens: what the trainer reads.

It knows the chat template's form, which tokens are answers, and how to fill a row with whole conversations of one
domain. A row follows from its number and the seed alone, so that training can resume anywhere and worker processes
need not talk to each other.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from tokenizers import Tokenizer

from minisgl.course.tutor.corpus import SHARES, Conversation, conversation
from minisgl.course.tutor.tokenizer import END, END_TURN, START_TURN

PROMPT_WEIGHT = 0.05
"""Loss weight of text that the model only reads."""

ANSWER_WEIGHT = {"lookup": 4.0, "absent": 4.0}
"""Loss weight of an answer's tokens where it is not 1: rows with a long handbook hold few answers."""


Array = TypeVar("Array")


class Rows(NamedTuple, Generic[Array]):
    """Some rows of `length` tokens. A token's weight is for predicting it; attention stays in a document."""

    tokens: Array  # int16 [rows, length]
    weights: Array  # float16 [rows, length]
    documents: Array  # int16 [rows, length], counts up in each row


def _interleaved() -> tuple[str, ...]:
    """Twenty slots that hold the domains by their shares, spread evenly."""
    slots = [
        ((i + 0.5) / share, name) for name, percent in SHARES.items() for share in [percent // 5] for i in range(share)
    ]
    return tuple(name for _, name in sorted(slots))


DOMAIN_OF_SLOT = _interleaved()


def domain_of(row: int) -> str:
    """The domain of a row: any twenty rows in sequence hold each by its share."""
    return DOMAIN_OF_SLOT[row % len(DOMAIN_OF_SLOT)]


def segments(talk: Conversation) -> list[tuple[str, float]]:
    """The text of a conversation, cut where the loss weight changes."""
    if talk.raw:
        (turn,) = talk.turns
        return [(turn.user + "\n", PROMPT_WEIGHT), (turn.answer + END, ANSWER_WEIGHT.get(turn.family, 1.0))]
    parts = []
    lead = f"{START_TURN}system\n{talk.system}{END_TURN}\n" if talk.system is not None else ""
    for turn in talk.turns:
        lead += f"{START_TURN}user\n{turn.user}{END_TURN}\n{START_TURN}assistant\n"
        parts += [(lead, PROMPT_WEIGHT), (turn.answer + END_TURN, ANSWER_WEIGHT.get(turn.family, 1.0))]
        lead = "\n"
    return parts


class Packer:
    """Writes rows with one tokenizer and one seed."""

    def __init__(self, tokenizer: Path, seed: int = 0, length: int = 2048) -> None:
        self.tokenizer = Tokenizer.from_file(str(tokenizer))
        self.seed = seed
        self.length = length

    def rows(self, first: int, count: int) -> Rows[np.ndarray]:
        """The rows `first` to `first + count - 1`."""
        rows = [self.row(first + i) for i in range(count)]
        return Rows(*(np.stack(arrays) for arrays in zip(*rows, strict=True)))

    def row(self, number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """One row: conversations of one domain, the last one cut off at the row's end."""
        rng = random.Random(f"{self.seed} {number}")
        domain = domain_of(number)
        tokens: list[int] = []
        weights: list[float] = []
        documents: list[int] = []
        document = 0
        while len(tokens) < self.length:
            parts = segments(conversation(rng, domain, self.length - len(tokens)))
            encoded = self.tokenizer.encode_batch_fast([text for text, _ in parts], add_special_tokens=False)
            for encoding, (_, weight) in zip(encoded, parts, strict=True):
                tokens += encoding.ids
                weights += [weight] * len(encoding.ids)
            documents += [document] * (len(tokens) - len(documents))
            document += 1
        cut = slice(self.length)
        return (
            np.asarray(tokens[cut], np.int16),
            np.asarray(weights[cut], np.float16),
            np.asarray(documents[cut], np.int16),
        )
