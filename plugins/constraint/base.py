"""The interface of a constraint, which says which tokens a request may sample next, and the bits of its masks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from minisgl.core import I32, Bools

if TYPE_CHECKING:
    from minisgl.plugins.constraint.manager import ConstraintManager


class Constraint(Protocol):
    """The grammar of one request: which tokens the request may sample next.

    A subclass need define only `advance` and `masks`.
    """

    def advance(self, tokens: Sequence[int]) -> None:
        """Add sampled tokens to the request's output, in order."""

    def masks(self, drafts: Sequence[int]) -> I32:
        """Return the masks for the next token and for the token after each draft, as if the drafts were sampled.

        The result is int32 ``[1 + len(drafts), ceil(vocab_size / 32)]`` with the bits of `TokenMasks`. A mask after a
        draft that the grammar does not allow has no effect, since the draft is then rejected. A mask without a token
        ends the request with an error, if it gets as far.
        """

    def is_ready(self, seconds: float = 0.0) -> bool:
        """Return whether the other methods answer at once. Wait for this for at most ``seconds``.

        A request enters the waiting queue when its constraint is ready. By default, it always is.
        """
        return True

    def allowed(self, drafts: Sequence[int]) -> int:
        """Return how many of the drafts the grammar allows: those before the first that it forbids."""
        for count, (mask, draft) in enumerate(zip(self.masks(drafts), drafts, strict=False)):
            if not mask[draft // 32] >> draft % 32 & 1:
                return count
        return len(drafts)

    def forced(self, count: int) -> Sequence[int]:
        """Return at most ``count`` tokens that come next if only one text is possible next; none by default.

        They are guesses, which are verified like other drafts: other tokens may have the same text.
        """
        return ()

    def make_manager(self, vocab_size: int) -> ConstraintManager:
        """Return what keeps the constraints of a scheduler. It is called for the first request with a constraint."""
        from minisgl.plugins.constraint.manager import ConstraintManager

        return ConstraintManager(vocab_size)


def pack_mask(allowed: Bools) -> I32:
    """Return the bits of `minisgl.core.TokenMasks` for ``allowed`` bool ``[tokens]``: int32 ``[ceil(tokens / 32)]``."""
    bits = np.zeros(-(-len(allowed) // 32) * 4, np.uint8)
    packed = np.packbits(allowed, bitorder="little")
    bits[: len(packed)] = packed
    return bits.view(np.int32)


def mask_of(tokens: Iterable[int], vocab_size: int) -> I32:
    """Return the mask that allows ``tokens``: int32 ``[ceil(vocab_size / 32)]``. Ids beyond have no bit."""
    allowed = np.zeros(vocab_size, bool)
    ids = np.fromiter(tokens, np.int64)
    allowed[ids[ids < vocab_size]] = True
    return pack_mask(allowed)
