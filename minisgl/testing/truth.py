"""Expected outputs of requests on the simulated engine, where each output token is a hash of all tokens before it.

An expected output depends only on the request itself: on no scheduler, page or batch. So it can be compared with the
output of any scheduler (promise 8). The prefix hash is a polynomial in a fixed odd base modulo 2^64, so that one
cumulative sum gives the hashes of all prefixes of a prompt.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from minisgl.core import I32, FinishReason, SamplingParams

U64 = npt.NDArray[np.uint64]

_MASK = (1 << 64) - 1
_BASE = 0x9E3779B97F4A7C15  # odd, so that it has an inverse modulo 2^64
_INVERSE = pow(_BASE, -1, 1 << 64)
_EMPTY = 0x243F6A8885A308D3  # the hash of the empty prefix


class SimRequest(NamedTuple):
    """A request as its client sends it: the prompt's token ids and the sampling parameters."""

    prompt: Sequence[int] | I32
    params: SamplingParams


class Expected(NamedTuple):
    """The complete output of a `SimRequest`.

    ``reason`` is the finish reason. ``stop_id`` is the stop token that ended the request, which is also the last of
    ``tokens``; None if the request reached ``max_tokens`` without a stop token.
    """

    tokens: list[int]
    reason: FinishReason
    stop_id: int | None


def mix(x: int) -> int:
    """Return a hash of 64 bits: SplitMix64, with ``x`` as its state. Each input bit affects every output bit."""
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
    """Return the hashes of all prefixes, [n + 1] uint64. Element i is the hash of the first i tokens."""
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
    """Return the number that is combined with the prefix hash to sample a token.

    It is a hash of the seed if the request is not greedy and has a seed, and 0 otherwise.
    """
    return 0 if params.greedy or params.seed is None else mix(params.seed & _MASK)


class ExpectedTokens:
    """The expected tokens and prefix hashes of one request, computed on demand.

    ``tokens[i]`` is token i of the prompt followed by the output. ``hashes[i]`` is the hash of the first i tokens. Both
    are valid for the first ``num_known`` tokens. The tokens continue after a stop token, because a step that was in
    flight when the request ended computes positions after the stop token.
    """

    def __init__(self, request: SimRequest, vocab_size: int):
        prompt = np.asarray(request.prompt, np.int32)
        self.params = request.params
        self.num_prompt_tokens = self.num_known = len(prompt)
        self.max_len = len(prompt) + request.params.max_tokens
        self.tokens = prompt.copy()
        self.hashes = prefix_hashes(prompt)
        self._vocab_size = vocab_size
        self._salt = salt(request.params)

    def extend(self, length: int) -> None:
        """Compute the tokens and hashes up to ``length`` tokens."""
        if length <= self.num_known:
            return
        if length > len(self.tokens):
            more = max(length, 2 * len(self.tokens)) - len(self.tokens)
            self.tokens = np.concatenate((self.tokens, np.empty(more, np.int32)))
            self.hashes = np.concatenate((self.hashes, np.empty(more, np.uint64)))
        prefix = int(self.hashes[self.num_known])
        for i in range(self.num_known, length):
            token = mix(prefix ^ self._salt) % self._vocab_size
            prefix = (prefix * _BASE + mix(token)) & _MASK
            self.tokens[i] = token
            self.hashes[i + 1] = prefix
        self.num_known = length

    def __getitem__(self, position: int) -> int:
        self.extend(position + 1)
        return int(self.tokens[position])


def stop_ids(params: SamplingParams, eos_ids: Collection[int]) -> frozenset[int]:
    """Return the token ids that end a request."""
    return frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else frozenset(eos_ids))


def expected_output(request: SimRequest, vocab_size: int, eos_ids: Collection[int] = ()) -> Expected:
    """Return the output that ``request`` must get, whatever other requests are in its batches."""
    expected = ExpectedTokens(request, vocab_size)
    stops = stop_ids(request.params, eos_ids)
    tokens: list[int] = []
    for position in range(expected.num_prompt_tokens, expected.max_len):
        tokens.append(expected[position])
        if tokens[-1] in stops:
            return Expected(tokens, "stop", tokens[-1])
    return Expected(tokens, "length", None)
