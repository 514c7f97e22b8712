"""Expected outputs of requests on the simulated engine, where each output token is a hash of all tokens before it.

An expected output depends only on the request itself: on no scheduler, page or batch. So it can be compared with the
output of any scheduler (promise 8). The prefix hash is a polynomial in a fixed odd base modulo 2^64, so that one
cumulative sum gives the hashes of all prefixes of a prompt.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from minisgl.core import I32, Bools, FinishReason, SamplingParams

U64 = npt.NDArray[np.uint64]

_MASK = (1 << 64) - 1
_BASE = 0x9E3779B97F4A7C15  # odd, so that it has an inverse modulo 2^64
_INVERSE = pow(_BASE, -1, 1 << 64)
_EMPTY = 0x243F6A8885A308D3  # the hash of the empty prefix

WITH_DEAD_ENDS = 2
"""The number of the made-up grammar that sometimes allows no token."""
DEAD_ENDS = 12
"""It allows none after about one prefix in this number."""


class SimRequest(NamedTuple):
    """A request as its client sends it: the prompt's token ids and the sampling parameters.

    ``grammar`` is the number of a made-up grammar (`allowed_tokens`); None: every token is allowed.
    """

    prompt: Sequence[int] | I32
    params: SamplingParams
    grammar: int | None = None


class Expected(NamedTuple):
    """The complete output of a `SimRequest`.

    ``reason`` is the finish reason: "error" where the grammar allows no further token. ``stop_id`` is the stop token
    that ended the request, which is also the last of ``tokens``; None if it ended without a stop token.
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


def extend_hash(prefix: int, token: int) -> int:
    """Return the hash of the prefix with hash ``prefix`` followed by ``token``."""
    return (prefix * _BASE + mix(token)) & _MASK


def allowed_tokens(prefix: int, grammar: int, vocab_size: int) -> Bools:
    """Return which tokens ``grammar`` allows after the prefix with hash ``prefix``: bool ``[vocab_size]``.

    About half of them, chosen by a hash, and at least one; but none after one in `DEAD_ENDS` prefixes of the grammar
    `WITH_DEAD_ENDS`.
    """
    state = mix(prefix ^ mix(grammar))
    if grammar == WITH_DEAD_ENDS and state % DEAD_ENDS == 0:
        return np.zeros(vocab_size, bool)
    allowed: Bools = (
        _mix_array(np.arange(vocab_size, dtype=np.int32) ^ np.int32(state & 0x7FFFFFFF)) & np.uint64(1) == 1
    )
    allowed[state % vocab_size] = True
    return allowed


def pack_mask(allowed: Bools) -> I32:
    """Return the bits of `minisgl.core.TokenMasks` for ``allowed`` bool ``[vocab_size]``."""
    padded = np.zeros(-(-len(allowed) // 32) * 32, bool)
    padded[: len(allowed)] = allowed
    return np.packbits(padded, bitorder="little").view(np.int32)


def choose(prefix: int, salt: int, allowed: Bools | None, vocab_size: int) -> int:
    """Return the token that the simulated engine samples after a prefix, among the allowed tokens.

    None, or no allowed token: among all.
    """
    token = mix(prefix ^ salt) % vocab_size
    if allowed is None or not allowed.any():
        return token
    return int((token + np.flatnonzero(np.roll(allowed, -token))[0]) % vocab_size)


def score(prefix: int, token: int) -> float:
    """Return the made-up log-probability of ``token`` after the prefix with hash ``prefix``."""
    return -(mix(prefix ^ mix(token)) >> 40) / 2**20


def namespace(params: SamplingParams) -> int:
    """Return a number that differs between requests that must not share KV: a hash of ``cache_salt``; 0 without it."""
    if params.cache_salt is None:
        return 0
    return int.from_bytes(hashlib.blake2b(params.cache_salt.encode(), digest_size=8).digest(), "little") | 1


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
        self.salt = salt(request.params)
        self.grammar = request.grammar
        self.namespace = namespace(request.params)  # part of the KV's content, and of no token

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
            token = self.sampled_after(prefix)
            prefix = extend_hash(prefix, token)
            self.tokens[i] = token
            self.hashes[i + 1] = prefix
        self.num_known = length

    def sampled_after(self, prefix: int) -> int:
        """Return the token that the request samples after the prefix with hash ``prefix``."""
        allowed = None if self.grammar is None else allowed_tokens(prefix, self.grammar, self._vocab_size)
        return choose(prefix, self.salt, allowed, self._vocab_size)

    def is_dead_end(self, prefix: int) -> bool:
        """Return whether the request's grammar allows no token after the prefix with hash ``prefix``."""
        return self.grammar is not None and not allowed_tokens(prefix, self.grammar, self._vocab_size).any()

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
        expected.extend(position)
        if expected.is_dead_end(int(expected.hashes[position])):
            return Expected(tokens, "error", None)
        tokens.append(expected[position])
        if tokens[-1] in stops:
            return Expected(tokens, "stop", tokens[-1])
    return Expected(tokens, "length", None)
