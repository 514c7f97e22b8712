"""What each request's answer must be, derived from the request alone: a token is a hash of its prefix.

Knows one request at a time and nothing of schedulers, pages or batches; that is why it can judge them (promise 8).
The prefix hash is a polynomial in a fixed odd base modulo 2^64, so that all prefixes of a prompt come from one
cumulative sum.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from minisgl.core import I32, FinishReason, SamplingParams

U64 = npt.NDArray[np.uint64]

_MASK = (1 << 64) - 1
_BASE = 0x9E3779B97F4A7C15  # odd, so that its powers can be divided by
_INVERSE = pow(_BASE, -1, 1 << 64)
_EMPTY = 0x243F6A8885A308D3  # the hash of the empty prefix


class Ask(NamedTuple):
    """A request, as its client wrote it."""

    prompt: Sequence[int] | I32
    params: SamplingParams


class Expected(NamedTuple):
    """The whole answer to an `Ask`. ``tokens`` ends with ``stop_id`` where a token ended it."""

    tokens: list[int]
    reason: FinishReason
    stop_id: int | None


def mix(x: int) -> int:
    """SplitMix64's finaliser: 64 bits to 64 bits, every input bit moves every output bit."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def _mix_array(tokens: I32) -> U64:
    x = tokens.astype(np.int64).astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def prefix_hashes(tokens: Sequence[int] | I32) -> U64:
    """[n + 1] uint64: element i is the hash of the first i tokens."""
    ids = np.asarray(tokens, np.int32)
    n = len(ids)
    powers = np.full(n + 1, _BASE, np.uint64)
    powers[0] = 1
    inverses = np.full(n, _INVERSE, np.uint64)
    sums = np.empty(n + 1, np.uint64)
    sums[0] = _EMPTY
    np.cumsum(_mix_array(ids) * np.cumprod(inverses), out=sums[1:])
    sums[1:] += np.uint64(_EMPTY)
    return sums * np.cumprod(powers)


def salt(params: SamplingParams) -> int:
    """What the parameters add to a token's hash: the seed, where the request samples and gives one."""
    return 0 if params.greedy or params.seed is None else mix(params.seed & _MASK)


class Truth:
    """One request's tokens and prefix hashes, as far as they were asked for. The stream does not end at a stop id:
    what a step that was already in flight computes past it has a right answer too.

    ``tokens[i]`` is token i of prompt and output, ``hashes[i]`` the hash of the first i tokens, for i up to ``known``.
    """

    def __init__(self, ask: Ask, vocab_size: int):
        prompt = np.asarray(ask.prompt, np.int32)
        self.params = ask.params
        self.prompt_len = self.known = len(prompt)
        self.max_len = len(prompt) + ask.params.max_tokens
        self.tokens = prompt.copy()
        self.hashes = prefix_hashes(prompt)
        self._vocab_size = vocab_size
        self._salt = salt(ask.params)

    def extend(self, length: int) -> None:
        """Make the first ``length`` tokens known."""
        if length <= self.known:
            return
        if length > len(self.tokens):
            more = max(length, 2 * len(self.tokens)) - len(self.tokens)
            self.tokens = np.concatenate((self.tokens, np.empty(more, np.int32)))
            self.hashes = np.concatenate((self.hashes, np.empty(more, np.uint64)))
        prefix = int(self.hashes[self.known])
        for i in range(self.known, length):
            token = mix(prefix ^ self._salt) % self._vocab_size
            prefix = (prefix * _BASE + mix(token)) & _MASK
            self.tokens[i] = token
            self.hashes[i + 1] = prefix
        self.known = length

    def __getitem__(self, position: int) -> int:
        self.extend(position + 1)
        return int(self.tokens[position])


def stop_ids(params: SamplingParams, eos_ids: Collection[int]) -> frozenset[int]:
    """The token ids that end a request."""
    return frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else frozenset(eos_ids))


def expected_output(ask: Ask, vocab_size: int, eos_ids: Collection[int] = ()) -> Expected:
    """The answer that ``ask`` must get, whoever its neighbours are."""
    truth = Truth(ask, vocab_size)
    stops = stop_ids(ask.params, eos_ids)
    tokens: list[int] = []
    for position in range(truth.prompt_len, truth.max_len):
        tokens.append(truth[position])
        if tokens[-1] in stops:
            return Expected(tokens, "stop", tokens[-1])
    return Expected(tokens, "length", None)
