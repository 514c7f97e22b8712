"""A proposer that looks up the last tokens of all requests of a step together (prompt lookup decoding).

The tokens of each running request are in a row of an array. Its drafts are what followed the latest earlier occurrence
of its last ``match_tokens`` tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from minisgl.core import EngineSpec, Req
from minisgl.hooks import hookimpl
from minisgl.plugins.speculation import DraftProposer


@dataclass
class Batches:
    """Drafts copied from an earlier place in the same request."""

    max_drafts: int = 8
    """Largest number of draft tokens of a request in one step."""
    match_tokens: int = 3
    """Number of tokens that must be equal at both places."""

    def build(self, spec: EngineSpec) -> BatchProposer:
        return BatchProposer(spec.max_running_requests, spec.max_seq_len + 1, self.max_drafts, self.match_tokens)


class BatchProposer(DraftProposer):
    """The proposer. A row of ``tokens`` is that of the request with this ``req_pool_idx``; ``lengths`` are in use."""

    def __init__(self, rows: int, columns: int, max_drafts: int, match_tokens: int):
        self.max_drafts, self.match_tokens = max_drafts, match_tokens
        self.tokens = np.zeros((rows, columns), np.int32)
        self.lengths = np.zeros(rows, np.int32)

    def admitted(self, req: Req) -> None:
        """Note the tokens of a request that begins to run, or runs again."""
        self.lengths[req.req_pool_idx] = 0
        self.append(req.req_pool_idx, req.tokens().tolist())

    def advanced(self, reqs: Sequence[Req], tokens: Sequence[Sequence[int]]) -> None:
        """Note the tokens that requests gained."""
        for req, run in zip(reqs, tokens, strict=True):
            self.append(req.req_pool_idx, run)

    def append(self, row: int, run: Sequence[int]) -> None:
        """Append tokens to a row."""
        begin = int(self.lengths[row])
        self.tokens[row, begin : begin + len(run)] = run
        self.lengths[row] = begin + len(run)

    def propose(self, reqs: Sequence[Req], positions: Sequence[int], limits: Sequence[int]) -> Sequence[Sequence[int]]:
        """Return the drafts of each request. Only requests with a limit, and with enough tokens, are looked up."""
        rows = [req.req_pool_idx for req in reqs]
        asked = [i for i, row in enumerate(rows) if limits[i] and self.lengths[row] > self.match_tokens]
        found = [self.follow(rows[i], positions[i], limits[i]) for i in asked]
        drafts: list[Sequence[int]] = [()] * len(reqs)
        for i, run in zip(asked, found, strict=True):
            drafts[i] = run
        return drafts

    def follow(self, row: int, position: int, limit: int) -> Sequence[int]:
        """Return ``limit`` guesses for ``position`` and the positions after it, or none.

        ``position`` is the length of the text, or one more: then the token before it is not known yet.
        """
        text = self.tokens[row, : self.lengths[row]]
        groups = np.lib.stride_tricks.sliding_window_view(text[:-1], self.match_tokens)
        equal = np.flatnonzero((groups == text[-self.match_tokens :]).all(1))
        if not len(equal):
            return ()
        copied = text[equal[-1] + self.match_tokens :].tolist()
        unread = position - len(text)
        return [copied[i % len(copied)] for i in range(unread, unread + limit)]


@hookimpl
def minisgl_configs() -> Iterable[tuple[str, str, type]]:
    """Register the options of this plugin."""
    yield "speculation", "museum", Batches
