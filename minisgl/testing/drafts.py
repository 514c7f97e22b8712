"""A proposer of draft tokens for the simulated engine, which knows the expected output and errs on purpose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from minisgl.core import Req
from minisgl.plugins.speculation import DraftProposer
from minisgl.testing.truth import ExpectedTokens, SimRequest, mix

__all__ = ["SeededProposer"]


class SeededProposer(DraftProposer):
    """Proposes drafts of which about ``percent`` in a hundred are right, by a pattern that depends on ``seed`` alone.

    A position has 0 to ``max_drafts`` drafts, or with ``full`` always as many. The pattern is a hash of seed, uid and
    position, so a request that is computed again gets the same drafts. ``requests`` and ``vocab_size`` are those of the
    simulated engine.
    """

    def __init__(
        self,
        requests: Mapping[int, SimRequest],
        vocab_size: int,
        *,
        max_drafts: int,
        percent: int,
        seed: int = 0,
        full: bool = False,
    ):
        self.requests, self.vocab_size = requests, vocab_size
        self.max_drafts, self.percent, self.seed, self.full = max_drafts, percent, seed, full
        self._expected: dict[int, ExpectedTokens] = {}

    def propose(self, reqs: Sequence[Req], positions: Sequence[int], limits: Sequence[int]) -> Sequence[Sequence[int]]:
        """Return the drafts of each request, at most ``limits[i]``."""
        return [self._drafts(req.uid, at, limit) for req, at, limit in zip(reqs, positions, limits, strict=True)]

    def _drafts(self, uid: int, position: int, limit: int) -> list[int]:
        if uid not in self._expected:
            self._expected[uid] = ExpectedTokens(self.requests[uid], self.vocab_size)
        expected = self._expected[uid]
        count = self.max_drafts if self.full else self._number(uid, position, 0) % (self.max_drafts + 1)
        count = min(count, limit)
        drafts = []
        for k in range(count):
            right = self._number(uid, position, 1 + k) % 100 < self.percent
            drafts.append((expected[position + k] + (0 if right else 1)) % self.vocab_size)
        return drafts

    def _number(self, uid: int, position: int, purpose: int) -> int:
        return mix(self.seed ^ mix(uid ^ mix(position ^ mix(purpose))))
