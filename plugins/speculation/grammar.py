"""`speculation=grammar`: drafts the tokens that a request's grammar leaves no choice about, such as the keys of JSON.

After ``{"`` an answer of a schema may have only one continuation: the name of the first property, a quote, a colon. So
the text is known before the model computes it, and all of its tokens are verified in one step. SGLang's jump-forward
decoding writes such a text without the model (Zheng et al., SGLang, 2024). Here its tokens are only drafts: the model
may write the same text with other tokens, and the output is that of plain decoding.

`Constraint.forced` of the group ``grammar`` gives the tokens. Where it gives none, another proposer may have drafts:
``speculation.then=ngram``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from minisgl.core import Req
from minisgl.hooks import hookimpl
from minisgl.plugins.speculation import DraftProposer


@dataclass
class GrammarDrafts:
    """Drafts of the tokens that a request's grammar forces; for other rows, the drafts of the proposer ``then``."""

    max_drafts: int = 16
    """Largest number of forced tokens of a request in one step."""
    then: str = "none"
    """The proposer for rows without a forced token, with its default options."""

    def build(self, build_other: Callable[[str], DraftProposer]) -> GrammarProposer:
        if self.max_drafts < 1:
            raise ValueError(f"speculation.max_drafts={self.max_drafts} must be at least 1.")
        if self.then == "grammar":
            raise ValueError("speculation.then=grammar: name another proposer, such as ngram.")
        return GrammarProposer(self.max_drafts, build_other(self.then))


class GrammarProposer(DraftProposer):
    """Asks the grammar of each request first, and the proposer ``then`` where the grammar forces no token."""

    def __init__(self, max_forced: int, then: DraftProposer):
        self.max_forced, self.then = max_forced, then
        self.max_drafts, self.costly = max(max_forced, then.max_drafts), then.costly

    def admitted(self, req: Req) -> None:
        self.then.admitted(req)

    def advanced(self, reqs: Sequence[Req], tokens: Sequence[Sequence[int]]) -> None:
        self.then.advanced(reqs, tokens)

    def removed(self, req: Req) -> None:
        self.then.removed(req)

    def close(self) -> None:
        self.then.close()

    def propose(self, reqs: Sequence[Req], positions: Sequence[int], limits: Sequence[int]) -> Sequence[Sequence[int]]:
        drafts = [self._forced(*each) for each in zip(reqs, positions, limits, strict=True)]
        others = [i for i, forced in enumerate(drafts) if not forced]
        if self.then.max_drafts and any(limits[i] for i in others):
            most = self.then.max_drafts
            found = self.then.propose(
                [reqs[i] for i in others], [positions[i] for i in others], [min(limits[i], most) for i in others]
            )
            for i, guessed in zip(others, found, strict=True):
                drafts[i] = guessed
        return drafts

    def _forced(self, req: Req, position: int, limit: int) -> Sequence[int]:
        """Return the forced tokens of a request from ``position`` on, at most ``limit``."""
        if req.constraint is None or not limit:
            return ()
        # The grammar knows the tokens of results that were read. The token before `position` may be unread: then the
        # drafts after it are certain only if it is forced too.
        unread = position - len(req)
        forced: Sequence[int] = req.constraint.forced(unread + min(limit, self.max_forced))
        return forced[unread:]


@hookimpl
def minisgl_configs() -> Any:
    yield "speculation", "grammar", GrammarDrafts
