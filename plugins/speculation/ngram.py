"""`speculation=ngram`: drafts what followed the last few tokens when they occurred before (prompt lookup decoding).

The last ``match_tokens`` tokens of a request are looked up in its own prompt and output. The tokens that followed their
latest earlier occurrence are the drafts. If these tokens did not occur before, half as many are looked up, down to one
token: a longer group is the better evidence, and a shorter one occurs more often. This pays where answers repeat parts
of the prompt: quotes, edits, code, facts from a document. Source: Saxena, "Prompt lookup decoding", 2023.

One token is little evidence: most tokens of a long random text occurred before too. So with ``match_tokens`` above 1,
one token is looked up only in a text that repeats itself: where at least `REPEATS` of the tokens are those that
followed the latest earlier occurrence of the token before them.

The tokens of all running requests are in one array. For each size of a group, each request has a hash table that maps a
group to the position after its latest occurrence. So each turn costs a few array operations, whatever the number and
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
from minisgl.plugins.speculation import DraftProposer

REPEATS = 0.05
"""One token is looked up only in a text with at least this share of repeated pairs of tokens."""
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # odd, and its bits are evenly spread
_MAX_BITS = 17  # of the size of a hash table: 512 KiB for each request and size of a group


@dataclass
class Ngram:
    """Drafts copied from an earlier place in the same request, where the last tokens occurred before."""

    max_drafts: int = 16
    """Largest number of draft tokens of a request in one step."""
    match_tokens: int = 4
    """Number of tokens that must be equal at both places. If they are at no other place, half as many are looked up."""

    def build(self, spec: EngineSpec) -> NgramProposer:
        return NgramProposer(spec.max_running_requests, spec.max_seq_len + 1, self.max_drafts, self.match_tokens)


class NgramProposer(DraftProposer):
    """Looks up the last tokens of each request. ``rows`` and ``columns`` are those of the page table.

    A row of the arrays belongs to the request with that ``req_pool_idx``.
    """

    def __init__(self, rows: int, columns: int, max_drafts: int, match_tokens: int):
        if max_drafts < 1:
            raise ValueError(f"max_drafts={max_drafts}: max_drafts must be at least 1")
        if match_tokens < 1:
            raise ValueError(f"match_tokens={match_tokens}: match_tokens must be at least 1")
        self.max_drafts, self.match_tokens = max_drafts, match_tokens
        self.sizes = [match_tokens >> k for k in range(match_tokens.bit_length())]
        """The sizes of the groups that are looked up, the longest first: 4, 2 and 1."""
        bits = min(_MAX_BITS, (8 * columns - 1).bit_length())
        self._shift = np.uint64(64 - bits)
        self._tokens = np.zeros((rows, columns), np.int32)
        self._lengths = np.zeros(rows, np.int32)
        self._repeats = np.zeros(rows, np.int32)  # tokens that followed the latest occurrence of the token before them
        # For each size: hash of a group of tokens → the position after its latest occurrence, or 0 if it did not occur.
        self._after = {size: np.zeros((rows, 1 << bits), np.int32) for size in self.sizes}

    def admitted(self, req: Req) -> None:
        row, ids = req.req_pool_idx, req.tokens()
        self._tokens[row, : len(ids)] = ids
        self._lengths[row] = len(ids)
        self._repeats[row] = _repeats(ids)
        for size, after in self._after.items():
            after[row] = 0
            if len(ids) > size:
                groups = np.lib.stride_tricks.sliding_window_view(ids[:-1], size)
                # Duplicate indices: numpy keeps the last write, that of the latest group.
                after[row, self._hash(groups)] = np.arange(size, len(ids), dtype=np.int32)

    def advanced(self, reqs: Sequence[Req], tokens: Sequence[Sequence[int]]) -> None:
        rows = np.array([req.req_pool_idx for req in reqs], np.int32)
        counts = np.array([len(run) for run in tokens], np.int32)
        for k in range(int(counts.max(initial=0))):
            some = np.flatnonzero(counts > k)
            self._append(rows[some], np.array([tokens[i][k] for i in some.tolist()], np.int32))

    def _append(self, rows: I32, tokens: I32) -> None:
        lengths = self._lengths[rows]
        found, after = self._find(rows, lengths, 1)
        self._repeats[rows[found]] += self._tokens[rows[found], after] == tokens[found]
        for size, table in self._after.items():
            long = lengths >= size
            known, ends = rows[long], lengths[long]
            table[known, self._hash(self._group(known, ends, size))] = ends
        self._tokens[rows, lengths] = tokens
        self._lengths[rows] += 1

    def propose(self, reqs: Sequence[Req], positions: Sequence[int], limits: Sequence[int]) -> Sequence[Sequence[int]]:
        drafts: list[Sequence[int]] = [()] * len(reqs)
        rows = np.array([req.req_pool_idx for req in reqs], np.int32)
        lengths = self._lengths[rows]
        after, may_draft = np.zeros(len(reqs), np.int32), np.asarray(limits) > 0
        for size in self.sizes:
            wanted = may_draft & (after == 0)
            if size == 1 < self.match_tokens:
                wanted &= self._repeats[rows] >= REPEATS * lengths
            some = np.flatnonzero(wanted)
            found, ends = self._find(rows[some], lengths[some], size)
            after[some[found]] = ends
        some = np.flatnonzero(after)
        if not len(some):
            return drafts
        rows, lengths, after = rows[some], lengths[some], after[some]
        # If the token before `positions` is unread, the first token after the group is the guess for it.
        unread = np.asarray(positions, np.int32)[some] - lengths
        steps = np.arange(self.max_drafts, dtype=np.int32) + unread[:, None]
        columns = after[:, None] + steps % (lengths - after)[:, None]  # an overlapping match repeats itself
        for i, copied in zip(some.tolist(), self._tokens[rows[:, None], columns].tolist(), strict=True):
            drafts[i] = copied[: limits[i]]
        return drafts

    def _find(self, rows: I32, lengths: I32, size: int) -> tuple[npt.NDArray[np.intp], I32]:
        """Look up the last ``size`` of the ``lengths[i]`` tokens of each row.

        Return the indices of the rows in which they occurred before, and the positions after these occurrences.
        """
        some = np.flatnonzero(lengths >= size)
        rows, lengths = rows[some], lengths[some]
        group = self._group(rows, lengths, size)
        after = self._after[size][rows, self._hash(group)]
        found = np.flatnonzero((after > 0) & (self._group(rows, np.maximum(after, size), size) == group).all(1))
        return some[found], after[found]

    def _group(self, rows: I32, ends: I32, size: int) -> I32:
        """Return the ``size`` tokens before ``ends[i]`` in each row, int32 ``[rows, size]``."""
        group: I32 = self._tokens[rows[:, None], ends[:, None] + np.arange(-size, 0, dtype=np.int32)]
        return group

    def _hash(self, groups: I32) -> npt.NDArray[np.uint64]:
        """Return the column of each group in the hash table, for groups ``[…, size]``."""
        value = np.zeros(groups.shape[:-1], np.uint64)
        for k in range(groups.shape[-1]):
            value = (value + groups[..., k].astype(np.uint64) + np.uint64(1)) * _MULTIPLIER
            value ^= value >> np.uint64(29)
        return value * _MULTIPLIER >> self._shift


def _repeats(ids: I32) -> int:
    """Return how many tokens followed the latest earlier occurrence of the token before them too."""
    order = np.argsort(ids, kind="stable")
    equal = ids[order[1:]] == ids[order[:-1]]
    earlier, later = order[:-1][equal], order[1:][equal]
    followed = later < len(ids) - 1
    return int((ids[earlier[followed] + 1] == ids[later[followed] + 1]).sum())


@hookimpl
def minisgl_configs() -> Any:
    yield "speculation", "ngram", Ngram
