"""Packing of conversations into rows of tokens, which the trainer reads.

This module knows the form of the chat template and which tokens are answers, and fills each row with conversations of
one domain. A row depends only on its number and the seed. So training can resume at any row, and worker processes
need not communicate with each other.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import ClassVar, Generic, NamedTuple, TypeVar

import numpy as np
from tokenizers import Tokenizer

from minisgl.chapters.tutor import tools
from minisgl.chapters.tutor.corpus import SHARES, Conversation, conversation
from minisgl.chapters.tutor.tokenizer import END, END_TURN, START_TURN

PROMPT_WEIGHT = 0.05
"""Loss weight of the tokens of prompts: system messages and user messages."""

ANSWER_WEIGHT = {"lookup": 4.0, "absent": 4.0, "call": 2.0, "result": 2.0}
"""Loss weight of an answer's tokens by family; 1 for others. Rows with long handbooks or tools hold few answers."""


Array = TypeVar("Array")


class Rows(NamedTuple, Generic[Array]):
    """Rows of packed tokens, as numpy arrays or tensors.

    A token's weight is the weight of its prediction in the loss. A token attends only to tokens of its own document.
    """

    tokens: Array  # int16 [rows, length]
    weights: Array  # float16 [rows, length]
    documents: Array  # int16 [rows, length], document numbers from 0 in each row


def _interleaved() -> tuple[str, ...]:
    """Return the domains of twenty consecutive rows: each domain by its share, evenly spread."""
    positions = [
        ((i + 0.5) / share, name) for name, percent in SHARES.items() for share in [percent // 5] for i in range(share)
    ]
    return tuple(name for _, name in sorted(positions))


DOMAIN_CYCLE = _interleaved()


def domain_of(row: int) -> str:
    """Return the domain of a row. Any twenty consecutive rows contain each domain by its share."""
    return DOMAIN_CYCLE[row % len(DOMAIN_CYCLE)]


def segments(talk: Conversation) -> list[tuple[str, float]]:
    """Return the text of a conversation as (text, loss weight of its tokens) pairs, in order."""
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
    """Packs rows of ``length`` tokens with one tokenizer and one seed."""

    def __init__(self, tokenizer: Path, seed: int = 0, length: int = 2048) -> None:
        self.tokenizer = Tokenizer.from_file(str(tokenizer))
        self.seed = seed
        self.length = length

    @classmethod
    def domain_of(cls, row: int) -> str:
        """Return the domain of a row."""
        return domain_of(row)

    def conversation(self, rng: random.Random, domain: str, tokens: int) -> Conversation:
        """Return a conversation of a domain. One about a handbook has at most about ``tokens`` tokens."""
        return conversation(rng, domain, tokens)

    def rows(self, first: int, count: int) -> Rows[np.ndarray]:
        """Return the rows ``first`` to ``first + count - 1``."""
        rows = [self.row(first + i) for i in range(count)]
        return Rows(*(np.stack(arrays) for arrays in zip(*rows, strict=True)))

    def row(self, number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the tokens, loss weights and document numbers of one row, each [length].

        The row holds conversations of one domain. The last conversation is cut off at the end of the row.
        """
        rng = random.Random(f"{self.seed} {number}")
        domain = self.domain_of(number)
        tokens: list[int] = []
        weights: list[float] = []
        documents: list[int] = []
        document = 0
        while len(tokens) < self.length:
            parts = segments(self.conversation(rng, domain, self.length - len(tokens)))
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


class ToolPacker(Packer):
    """Packs conversations with tools into every third row, the domain ``tools``, and the usual text into the others."""

    EVERY: ClassVar[int] = 3

    @classmethod
    def domain_of(cls, row: int) -> str:
        return domain_of(row - row // cls.EVERY - 1) if row % cls.EVERY else "tools"

    def conversation(self, rng: random.Random, domain: str, tokens: int) -> Conversation:
        return tools.conversation(rng, tokens) if domain == "tools" else conversation(rng, domain, tokens)


class FewToolsPacker(ToolPacker):
    """Packs conversations with tools into every sixth row. So any 24 rows hold 20 of the usual text."""

    EVERY: ClassVar[int] = 6


class HandbookPacker(FewToolsPacker):
    """Packs handbooks into every second row, and the rows of `FewToolsPacker` into the others."""

    @classmethod
    def domain_of(cls, row: int) -> str:
        return "handbook" if row % 2 else super().domain_of(row // 2)
