"""A made-up grammar as the scheduler sees it, for the simulated engine. It needs `plugins/constraint`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from minisgl.core import I32
from minisgl.plugins.constraint.base import Constraint
from minisgl.testing.truth import SimRequest, allowed_tokens, extend_hash, pack_mask, prefix_hashes

__all__ = ["FakeGrammar"]


class FakeGrammar(Constraint):
    """The made-up grammar of a request, as the scheduler sees it."""

    def __init__(self, request: SimRequest, vocab_size: int):
        assert request.grammar is not None
        self.grammar, self.vocab_size = request.grammar, vocab_size
        self._prefix = int(prefix_hashes(request.prompt)[-1])

    def advance(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._prefix = extend_hash(self._prefix, token)

    def masks(self, drafts: Sequence[int]) -> I32:
        prefixes = [self._prefix]
        for draft in drafts:
            prefixes.append(extend_hash(prefixes[-1], draft))
        return np.stack([pack_mask(allowed_tokens(prefix, self.grammar, self.vocab_size)) for prefix in prefixes])

    def forced(self, count: int) -> list[int]:
        forced: list[int] = []
        prefix = self._prefix
        while len(forced) < count:
            only = np.flatnonzero(allowed_tokens(prefix, self.grammar, self.vocab_size)).tolist()
            if len(only) != 1:
                break
            forced += only
            prefix = extend_hash(prefix, only[0])
        return forced
