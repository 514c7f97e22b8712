"""Estimates how many tokens a running request will still write, from the lengths of the answers that ended.

These tokens are the reserve: admission keeps pages free for them, for every running request. Promise 5 holds with any
reserve. A reserve that is too small causes retractions; a reserve that is too large makes batches small. This module
knows numbers of tokens only.
"""

from __future__ import annotations

FIRST_LENGTH = 128.0
"""Length of an answer in tokens that is assumed before any answer has ended."""

SHARE = 1 / 4
"""Share of the mean length of an answer that is reserved for each running request.

An answer has half of its length left on average. But answers end at different times, and each that ends leaves its
pages to the others, so less is needed in reserve.
"""

WINDOW = 32
"""Number of answers over which the mean length is taken, with exponentially decreasing weights."""


class Reserve:
    """The number of tokens for which admission keeps pages free, for each running request.

    It depends only on the answers that ended and on the retractions, so it is the same in every run of the same steps.
    SGLang estimates with its ``new_token_ratio``, which falls with every step and rises after a retraction.
    """

    def __init__(self) -> None:
        self.mean_length = FIRST_LENGTH

    @property
    def num_tokens(self) -> int:
        """Number of tokens to reserve for each running request."""
        return max(round(self.mean_length * SHARE), 1)

    def answer_ended(self, length: int) -> None:
        """Count an answer of ``length`` tokens that was complete."""
        self.mean_length += (length - self.mean_length) / WINDOW

    def pages_ran_out(self) -> None:
        """Raise the estimate, because a request is retracted for lack of pages: the reserve was too small."""
        self.mean_length += self.mean_length / WINDOW
