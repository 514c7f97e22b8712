"""Grammars that begin after a token: the masks before it, and those of drafts across it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from minisgl.core import I32
from minisgl.plugins.constraint.after_token import AfterToken

VOCAB, END, OPENER, AFTER = 40, 39, 7, 8


def tokens(mask: I32) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


class Counting:
    """Allows token 0, then token 1, and so on."""

    def __init__(self) -> None:
        self.next = 0

    def advance(self, tokens: Sequence[int]) -> None:
        self.next += len(tokens)

    def masks(self, drafts: Sequence[int]) -> I32:
        found = np.zeros((1 + len(drafts), 2), np.int32)
        for i in range(1 + len(drafts)):
            found[i, 0] = 1 << (self.next + i)
        return found


ANY = set(range(VOCAB)) - {END}


@pytest.mark.parametrize(
    ("ids", "output", "expected"),
    [
        ([AFTER], [], ANY),
        ([AFTER], [3, 0, 5], ANY),
        ([AFTER], [3, AFTER], {0}),
        ([AFTER], [AFTER, 0, 1], {2}),
        ([AFTER], [AFTER, 0, AFTER], {2}),  # the token means nothing more later on
        ([AFTER, OPENER], [], {0, OPENER}),
        ([AFTER, OPENER], [0], {1}),
        ([AFTER, OPENER], [0, 1], {2}),
        ([AFTER, OPENER], [OPENER], ANY),
        ([AFTER, OPENER], [OPENER, 4, AFTER], {0}),
        ([AFTER, OPENER], [OPENER, 4, AFTER, 0], {1}),
    ],
)
def test_masks_of_tokens_and_of_drafts(ids: list[int], output: list[int], expected: set[int]) -> None:
    """The mask after tokens is the one after the same tokens as drafts, whatever part of them is a draft."""
    for split in range(len(output) + 1):
        for pieces in ([output[:split]], [[token] for token in output[:split]]):
            constraint = AfterToken(Counting(), ids, VOCAB, [END])
            for piece in pieces:
                constraint.advance(piece)
            masks = constraint.masks(output[split:])
            assert masks.shape == (1 + len(output) - split, 2)
            assert tokens(masks[-1]) == expected
            again = constraint.masks(output[split:])
            assert (again == masks).all()
