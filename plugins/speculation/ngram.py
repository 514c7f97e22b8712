"""`speculation=ngram`: drafts what followed the last few tokens when they occurred before (prompt lookup decoding).

The last ``match_tokens`` tokens of a request are looked up in its own prompt and output. The tokens that followed their
latest earlier occurrence are the drafts. This pays where answers repeat parts of the prompt: quotes, edits, code.
Source: Saxena, "Prompt lookup decoding", 2023.

The tokens of all running requests are in one array, and a hash table for each request maps a group of ``match_tokens``
tokens to the position after its latest occurrence. So each turn costs a few array operations, whatever the number and
the length of the requests. A group may overwrite the entry of another one, which is then not found.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from minisgl.core import I32, EngineSpec, Req
from minisgl.hooks import hookimpl
from minisgl.scheduler.base import DraftProposer

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # odd, and its bits are evenly spread
_MAX_BITS = 17  # of the size of a hash table: 512 KiB for each request


@dataclass
class Ngram:
    """Drafts copied from an earlier place in the same request, where the last tokens occurred before."""

    max_drafts: int = 8
    """Largest number of draft tokens of a request in one step."""
    match_tokens: int = 3
    """Number of tokens that must be equal at both places."""


class NgramProposer(DraftProposer):
    """Looks up the last ``match_tokens`` tokens of each request. ``rows`` and ``columns`` are those of the page table.

    A row of the arrays belongs to the request with that ``req_pool_idx``.
    """

    def __init__(self, rows: int, columns: int, max_drafts: int, match_tokens: int):
        if max_drafts < 1:
            raise ValueError(f"max_drafts={max_drafts}: max_drafts must be at least 1")
        if match_tokens < 1:
            raise ValueError(f"match_tokens={match_tokens}: match_tokens must be at least 1")
        self.max_drafts, self.match_tokens = max_drafts, match_tokens
        bits = min(_MAX_BITS, (8 * columns - 1).bit_length())
        self._shift = np.uint64(64 - bits)
        self._tokens = np.zeros((rows, columns), np.int32)
        self._lengths = np.zeros(rows, np.int32)
        # Hash of a group of tokens → the position after its latest occurrence, or 0 if it did not occur.
        self._after = np.zeros((rows, 1 << bits), np.int32)
        self._offsets = np.arange(-match_tokens, 0, dtype=np.int32)

    def admitted(self, req: Req) -> None:
        row, ids, n = req.req_pool_idx, req.tokens(), self.match_tokens
        self._tokens[row, : len(ids)] = ids
        self._lengths[row] = len(ids)
        self._after[row] = 0
        if len(ids) > n:
            ends = np.arange(n, len(ids), dtype=np.int32)  # of equal columns, numpy keeps the last: the latest group
            self._after[row, self._hash(np.lib.stride_tricks.sliding_window_view(ids[:-1], n))] = ends

    def advanced(self, reqs: Sequence[Req], tokens: Sequence[Sequence[int]]) -> None:
        rows = np.array([req.req_pool_idx for req in reqs], np.int32)
        counts = np.array([len(run) for run in tokens], np.int32)
        for k in range(int(counts.max(initial=0))):
            some = np.flatnonzero(counts > k)
            self._append(rows[some], np.array([tokens[i][k] for i in some.tolist()], np.int32))

    def _append(self, rows: I32, tokens: I32) -> None:
        lengths = self._lengths[rows]
        long = lengths >= self.match_tokens
        if long.any():
            known, ends = rows[long], lengths[long]
            self._after[known, self._hash(self._group(known, ends))] = ends
        self._tokens[rows, lengths] = tokens
        self._lengths[rows] += 1

    def propose(self, reqs: Sequence[Req], positions: Sequence[int], limits: Sequence[int]) -> Sequence[Sequence[int]]:
        drafts: list[Sequence[int]] = [()] * len(reqs)
        rows = np.array([req.req_pool_idx for req in reqs], np.int32)
        lengths = self._lengths[rows]
        some = np.flatnonzero((lengths >= self.match_tokens) & (np.asarray(limits) > 0))
        if not len(some):
            return drafts
        rows, lengths = rows[some], lengths[some]
        group = self._group(rows, lengths)
        after = self._after[rows, self._hash(group)]
        found = np.flatnonzero((after > 0) & (self._group(rows, np.maximum(after, self.match_tokens)) == group).all(1))
        if not len(found):
            return drafts
        some, rows, lengths, after = some[found], rows[found], lengths[found], after[found]
        # If the token before `positions` is unread, the first token after the group is the guess for it.
        unread = np.asarray(positions, np.int32)[some] - lengths
        steps = np.arange(self.max_drafts, dtype=np.int32) + unread[:, None]
        columns = after[:, None] + steps % (lengths - after)[:, None]  # an overlapping match repeats itself
        for i, copied in zip(some.tolist(), self._tokens[rows[:, None], columns].tolist(), strict=True):
            drafts[i] = copied[: limits[i]]
        return drafts

    def _group(self, rows: I32, ends: I32) -> I32:
        """Return the ``match_tokens`` tokens before ``ends[i]`` in each row, int32 ``[rows, match_tokens]``."""
        group: I32 = self._tokens[rows[:, None], ends[:, None] + self._offsets]
        return group

    def _hash(self, groups: I32) -> npt.NDArray[np.uint64]:
        """Return the column of each group in the hash table, for groups ``[…, match_tokens]``."""
        value = np.zeros(groups.shape[:-1], np.uint64)
        for k in range(self.match_tokens):
            value = (value + groups[..., k].astype(np.uint64) + np.uint64(1)) * _MULTIPLIER
            value ^= value >> np.uint64(29)
        return value * _MULTIPLIER >> self._shift


@hookimpl
def minisgl_configs() -> Any:
    yield "speculation", "ngram", Ngram


@hookimpl
def minisgl_proposer(config: Any, spec: EngineSpec) -> NgramProposer | None:
    if not isinstance(config, Ngram):
        return None
    return NgramProposer(spec.max_running_requests, spec.max_seq_len + 1, config.max_drafts, config.match_tokens)
