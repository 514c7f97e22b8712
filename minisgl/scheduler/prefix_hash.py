"""Hashes of the prefixes of a prompt, by which the planner sees that two requests are about to compute the same page.

An equal hash makes a request wait for another one, so prompts that collide on purpose could delay other requests. No
hash decides which KV a request reads: the prefix cache compares token ids.
"""

from __future__ import annotations

import os

import numpy as np
import numpy.typing as npt

from minisgl.core import I32

PageHash = tuple[str | None, int]
"""A request's ``cache_salt``, and the hash of its tokens up to the end of a page."""


class PrefixHasher:
    """A multilinear hash modulo 2^64: the sum of (token + 1) times the position's secret random coefficient.

    The coefficients come from the operating system when the engine starts. Two different prefixes that are chosen
    without knowledge of the coefficients have the same hash with a probability of at most 2^(b - 64), where all token
    ids are below 2^b - 1: 2^-46 for a vocabulary of 150,000. A polynomial in one base, even a secret one, has no such
    bound modulo 2^64: the Thue-Morse sequence and its complement collide for every odd base.
    """

    def __init__(self, page_size: int):
        self.page_size = page_size
        self._coefficients: npt.NDArray[np.uint64] = np.empty(0, np.uint64)

    def hashes(self, tokens: I32) -> npt.NDArray[np.uint64]:
        """Return the hash of the first page of ``tokens``, of the first two pages, and so on: uint64 ``[pages]``."""
        end = len(tokens) // self.page_size * self.page_size
        if end > len(self._coefficients):
            self._add_coefficients(end - len(self._coefficients))
        values = tokens[:end].astype(np.uint64)
        values += np.uint64(1)  # so that a prefix and its extension by zeros differ
        shape = (-1, self.page_size)
        sums = np.einsum("ij,ij->i", values.reshape(shape), self._coefficients[:end].reshape(shape))
        return np.cumsum(sums, out=sums)

    def _add_coefficients(self, count: int) -> None:
        count = max(count, len(self._coefficients), 4096)
        new = np.frombuffer(os.urandom(8 * count), np.uint64)
        self._coefficients = np.concatenate((self._coefficients, new))
