"""`speculation=suffix`: drafts what followed a long match of the last tokens, in the request or in earlier answers.

The last tokens of a request are looked up in its own prompt and output, and in the answers of requests with the same
``cache_salt`` that ended before. The longer the match, the more drafts. This pays where answers repeat each other:
agents, fixed formats, a question asked again. Source: Oliaro et al., "SuffixDecoding", 2024.

The paper walks suffix trees and counts how often each token followed. A tree in Python takes some hundred bytes and a
microsecond for each token. Here, hash tables stand in for it: for groups of 1, 2, 4 and 8 times ``match_tokens``
tokens, they hold the place after the latest occurrence. The places found are compared token by token, and the longest
match is taken. It is at least half as long as the longest one that exists, up to 8 times ``match_tokens``; there are
no counts. A group may overwrite the entry of another one, which is then not found.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from minisgl.core import I32, I64, EngineSpec, Req
from minisgl.hooks import hookimpl
from minisgl.plugins.speculation import DraftProposer

U64 = npt.NDArray[np.uint64]

_BASE = 0x9E3779B97F4A7C15  # odd, so that it has an inverse modulo 2^64, and its bits are evenly spread
_MULTIPLIER = np.uint64(0xD6E8FEB86659FD93)  # another odd number with evenly spread bits
_LEVELS = 4  # lengths of groups
_MAX_BITS = 17  # of the size of a request's hash table: 512 KiB
_BEFORE = -1  # stands before the first token of a request
_BETWEEN = -2  # stands between two answers


@dataclass
class Suffix:
    """Drafts copied from the longest match found of the last tokens, in the same request or in earlier answers."""

    max_drafts: int = 16
    """Largest number of draft tokens of a request in one step. There are at most as many as tokens that match."""
    match_tokens: int = 3
    """Number of tokens that must be equal at both places."""
    max_tokens: int = 1_000_000
    """Tokens of earlier answers to keep, about 50 bytes each. The oldest ones are forgotten first; 0 keeps none."""

    def build(self, spec: EngineSpec) -> SuffixProposer:
        return SuffixProposer(
            spec.max_running_requests, spec.max_seq_len + 1, self.max_drafts, self.match_tokens, self.max_tokens
        )


class SuffixProposer(DraftProposer):
    """Looks up the last tokens of each request in its own text, and in earlier answers with the same salt.

    ``rows`` and ``columns`` are those of the page table; a row belongs to the request with that ``req_pool_idx``.

    All tokens are in one array: the rows of requests, then a ring of earlier answers. A *place* is an index of this
    array: ``longest`` tokens begin there, and the token after them is what followed. So the place of column c in a row
    is ``row * width + c``, and every row begins with ``longest`` entries `_BEFORE`.
    """

    def __init__(self, rows: int, columns: int, max_drafts: int, match_tokens: int, max_tokens: int):
        for name, value, least in (
            ("max_drafts", max_drafts, 1),
            ("match_tokens", match_tokens, 1),
            ("max_tokens", max_tokens, 0),
        ):
            if value < least:
                raise ValueError(f"{name}={value}: {name} must be at least {least}")
        self.max_drafts, self.match_tokens, self.max_tokens = max_drafts, match_tokens, max_tokens
        self.group_lengths = match_tokens << np.arange(_LEVELS)
        self.longest = int(self.group_lengths[-1])
        self._width = width = self.longest + columns + 1
        self._ring = rows * width  # the place of the ring's first token
        self._head = 0  # where in the ring the next answer begins

        self._text = np.zeros(self._ring + self.longest + max_tokens + max_drafts + 1, np.int32)
        self._text[: self._ring].reshape(rows, width)[:, : self.longest] = _BEFORE
        self._text[self._ring :] = _BETWEEN
        self._windows = np.lib.stride_tricks.sliding_window_view(self._text, self.longest)
        self._salt_of = np.zeros(self.longest + max_tokens, np.uint64)  # of each token in the ring
        self._lengths = np.zeros(rows, np.int64)
        self._kept = np.zeros(rows, np.int64)  # tokens that the request had when it was admitted
        self._salts = np.zeros(rows, np.uint64)

        # Sum over the first c tokens of hash(token) * BASE^position: two of them give the hash of a group.
        self._sums = np.zeros(rows * width, np.uint64)
        self._powers = np.cumprod(np.full(columns + 1, _BASE, np.uint64))
        self._inverses = np.cumprod(np.full(columns + 1, pow(_BASE, -1, 1 << 64), np.uint64))
        # Hash of a group → the place after its latest occurrence, or 0.
        self._bits = min(_MAX_BITS, (16 * columns - 1).bit_length())
        self._own = np.zeros(rows << self._bits, np.int32)
        self._earlier_bits = (2 * _LEVELS * max(max_tokens, 1) - 1).bit_length()
        self._earlier = np.zeros(1 << self._earlier_bits, np.int32)

    # ---- requests ------------------------------------------------------------------------------------------

    def admitted(self, req: Req) -> None:
        row, ids = req.req_pool_idx, req.tokens()
        self._own[row << self._bits : (row + 1) << self._bits] = 0
        self._lengths[row] = 0
        self._salts[row] = _salt_number(req.params.cache_salt)
        self._append(np.array([row]), np.array([len(ids)]), ids)
        self._kept[row] = len(ids)

    def advanced(self, reqs: Sequence[Req], tokens: Sequence[Sequence[int]]) -> None:
        rows = np.array([req.req_pool_idx for req in reqs], np.int64)
        counts = np.array([len(run) for run in tokens], np.int64)
        self._append(rows, counts, np.array([token for run in tokens for token in run], np.int32))

    def _append(self, rows: I64, counts: I64, tokens: I32) -> None:
        """Append ``counts[i]`` of the tokens to each row, and enter the groups that they followed."""
        firsts = np.cumsum(counts) - counts  # index of each row's first token
        columns = np.arange(len(tokens)) + np.repeat(self._lengths[rows] - firsts, counts)
        each = np.repeat(rows, counts)
        places = each * self._width + columns
        self._text[places + self.longest] = tokens
        terms = _mixed(tokens) * self._powers[columns]
        sums = np.cumsum(terms)
        sums += np.repeat(self._sums[places[firsts]] - (sums - terms)[firsts], counts)
        self._sums[places + 1] = sums
        # Of equal indices, numpy keeps the last one: the latest occurrence.
        self._own[self._own_slots(each, self._hashes(places, columns))] = places[:, None]
        self._lengths[rows] += counts

    def removed(self, req: Req) -> None:
        """Keep what the request gained since it was admitted, and the tokens before that, up to ``longest``."""
        row = req.req_pool_idx
        begin, end = int(self._kept[row]), int(self._lengths[row])
        first = max(0, begin - self.longest, end - self.max_tokens + 1)
        size = end - first
        begin = max(begin, first + 1)
        if begin >= end:
            return
        if self._head + size + 1 > self.max_tokens:
            self._head = 0
        at = self._ring + self.longest + self._head
        source = row * self._width + self.longest + first
        self._text[at : at + size] = self._text[source : source + size]
        self._text[at + size] = _BETWEEN
        self._salt_of[self._head + self.longest : self._head + self.longest + size] = self._salts[row]
        columns = np.arange(begin, end)
        hashes = self._hashes(row * self._width + columns, columns)
        places = columns + (self._ring + self._head - first)
        self._earlier[self._earlier_slots(self._salts[row], hashes)] = places[:, None]
        self._head += size + 1

    # ---- drafts --------------------------------------------------------------------------------------------

    def propose(self, reqs: Sequence[Req], positions: Sequence[int], limits: Sequence[int]) -> Sequence[Sequence[int]]:
        rows = np.array([req.req_pool_idx for req in reqs], np.int64)
        lengths = self._lengths[rows]
        now = rows * self._width + lengths
        found = self._candidates(rows, now, lengths)
        matches = self._match_lengths(found, now)
        best = matches.argmax(1)  # of equally long matches: the latest in the request itself
        each = np.arange(len(rows))
        place, match = found[each, best], matches[each, best]
        # A match in the request's own text that overlaps its last tokens repeats itself.
        period = np.where(place < self._ring, now - place, self.max_drafts + 1)
        steps = np.arange(self.max_drafts + 1) % np.maximum(period, 1)[:, None]
        copied = self._text[place[:, None] + self.longest + steps].tolist()
        # If the token before `positions` is unread, the first token is the guess for it.
        unread = (np.asarray(positions, np.int64) - lengths).tolist()
        drafts: list[Sequence[int]] = [()] * len(reqs)
        for i, length in enumerate(match.tolist()):
            if length >= self.match_tokens:
                run = copied[i]
                if _BETWEEN in run:
                    run = run[: run.index(_BETWEEN)]  # the next answer may be another user's
                drafts[i] = run[unread[i] : unread[i] + min(length, limits[i], self.max_drafts)]
        return drafts

    def _candidates(self, rows: I64, now: I64, lengths: I64) -> I64:
        """Return the places that the hash tables give, 0 for none: int64 ``[rows, 2 * levels]``, the own ones first."""
        hashes, salts = self._hashes(now, lengths), self._salts[rows]
        places = np.empty((len(rows), 2 * _LEVELS), np.int64)
        places[:, :_LEVELS] = self._own[self._own_slots(rows, hashes)]
        places[:, _LEVELS:] = earlier = self._earlier[self._earlier_slots(salts[:, None], hashes)]
        before = np.maximum(earlier - self._ring, 0) + (self.longest - 1)  # in the ring, the last token that matches
        places[:, _LEVELS:][self._salt_of[before] != salts[:, None]] = 0
        return places

    def _match_lengths(self, places: I64, now: I64) -> npt.NDArray[np.intp]:
        """Return how many tokens before each place and before ``now`` are equal, at most ``longest``."""
        equal = (self._windows[places] == self._windows[now][:, None])[:, :, ::-1]
        lengths: npt.NDArray[np.intp] = equal.argmin(2)
        lengths[equal.all(2)] = self.longest
        return lengths

    # ---- hashes --------------------------------------------------------------------------------------------

    def _hashes(self, places: I64, columns: I64) -> U64:
        """Return the hashes of the groups that end before the places, uint64 ``[places, levels]``.

        Before column c there are c tokens: a longer group is those. ``columns`` are the places' columns in their rows.
        """
        begins = places[:, None] - np.minimum(self.group_lengths, columns[:, None])
        hashes: U64 = (self._sums[places][:, None] - self._sums[begins]) * self._inverses[columns][:, None]
        return hashes

    def _own_slots(self, rows: I64, hashes: U64) -> I64:
        slots = (hashes * _MULTIPLIER >> np.uint64(64 - self._bits)).view(np.int64)
        return slots + (rows << self._bits)[:, None]

    def _earlier_slots(self, salts: Any, hashes: U64) -> I64:
        mixed = (hashes ^ salts) * _MULTIPLIER
        slots: I64 = (mixed >> np.uint64(64 - self._earlier_bits)).view(np.int64)
        return slots


def _mixed(tokens: I32) -> U64:
    mixed = (tokens.astype(np.uint64) + np.uint64(1)) * _MULTIPLIER
    mixed ^= mixed >> np.uint64(29)
    return mixed * _MULTIPLIER


def _salt_number(salt: str | None) -> int:
    """Return a number that differs between salts: 0 without one."""
    if salt is None:
        return 0
    return int.from_bytes(hashlib.blake2b(salt.encode(), digest_size=8).digest(), "little") | 1


@hookimpl
def minisgl_configs() -> Any:
    yield "speculation", "suffix", Suffix
