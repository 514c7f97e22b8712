"""The requests of `bench cluster`: those of a trace with prefix hashes, or made-up conversations."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from minisgl.bench.loadgen.traces import HASH_BLOCK, TraceRequest, read_trace
from minisgl.cluster.kv_events import block_hashes, root_hash
from minisgl.config import ConfigError
from minisgl.core import I32

FIRST_TOKEN = 2
"""The token of the first prefix block. Lower ones are left to the answers of simulated replicas."""


@dataclass(frozen=True)
class Request:
    """A request for a simulated replica.

    ``arrival`` is in seconds since the first request. ``blocks`` are numbers of prefix blocks of ``block_size`` tokens;
    the prompt ends within the last one. ``hashes`` are the hashes of the prompt's whole blocks.
    """

    arrival: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]
    block_size: int
    hashes: tuple[int, ...]

    def prompt_ids(self) -> I32:
        """Return the prompt. Each block is one token again and again, so equal blocks have equal tokens."""
        return prompt_ids(self.blocks, self.block_size, self.prompt_tokens)


def prompt_ids(blocks: Sequence[int], block_size: int, length: int) -> I32:
    """Return the first ``length`` tokens of the blocks: int32 ``[length]``."""
    tokens: I32 = np.repeat(np.array(blocks, np.int32) + np.int32(FIRST_TOKEN), block_size)[:length]
    return tokens


def prepare(entries: Sequence[TraceRequest], block_size: int) -> list[Request]:
    """Return the requests of a trace, with their hashes. Blocks of `HASH_BLOCK` tokens become ``block_size`` tokens.

    A block without a hash id is equal to no other one.
    """
    numbers: dict[object, int] = {}
    requests = []
    for place, entry in enumerate(entries):
        count = -(-entry.input_len // block_size)
        keys: Iterable[object] = [*entry.hash_ids[:count], *((place, i) for i in range(len(entry.hash_ids), count))]
        blocks = tuple(numbers.setdefault(key, len(numbers)) for key in keys)
        whole = prompt_ids(blocks, block_size, entry.input_len // block_size * block_size)
        hashes = tuple(block_hashes(root_hash(0), whole, block_size))
        arrival = (entry.timestamp or 0.0) - (entries[0].timestamp or 0.0)
        requests.append(Request(arrival, entry.input_len, entry.output_len, blocks, block_size, hashes))
    return requests


def read(path: Path, block_size: int) -> list[TraceRequest]:
    """Return the requests of a trace, with all lengths multiplied by ``block_size / HASH_BLOCK``.

    Raise `ConfigError` if the trace can't be read, or has no times or prefix hashes.
    """
    found = read_trace(path)
    if not any(request.hash_ids for request in found) or found[0].timestamp is None:
        raise ConfigError(
            f"--trace {path} has no times or no prefix hashes. Use a trace in Mooncake's format: JSON lines with "
            '"timestamp", "input_length", "output_length" and "hash_ids".'
        )
    return [scaled(request, block_size) for request in found]


def scaled(request: TraceRequest, block_size: int) -> TraceRequest:
    """Return a request with its lengths multiplied by ``block_size / HASH_BLOCK``, at least 1 token each."""
    factor = block_size / HASH_BLOCK
    input_len, output_len = (max(math.floor(n * factor), 1) for n in (request.input_len, request.output_len))
    return TraceRequest(request.timestamp, input_len, output_len, request.hash_ids)


def made_up(count: int, seed: int, block_size: int) -> list[TraceRequest]:
    """Return ``count`` requests of made-up conversations that arrive at random times, one a second on average.

    All prompts begin with the same block. A turn of a conversation has the blocks of the turn before, and one to four
    more. It is the last one with a probability of 1/5. At most 16 conversations are open at a time.
    """
    rng = np.random.default_rng(seed)
    times = np.cumsum(rng.exponential(1.0, count))
    open_ones: list[list[int]] = []
    requests, fresh = [], 1
    for time in (times - times[:1]).tolist():
        if not open_ones or (len(open_ones) < 16 and rng.random() < 0.5):
            open_ones.append([0])
        place = int(rng.integers(len(open_ones)))
        new = int(rng.integers(1, 5))
        open_ones[place].extend(range(fresh, fresh + new))
        fresh += new
        blocks = tuple(open_ones[place])
        input_len = len(blocks) * HASH_BLOCK - int(rng.integers(HASH_BLOCK))
        requests.append(scaled(TraceRequest(time, input_len, int(rng.integers(16, 257)), blocks), block_size))
        if rng.random() < 0.2:
            del open_ones[place]
    return requests


def unlimited_hit_rate(requests: Sequence[Request]) -> float:
    """Return the share of prompt tokens that a cache without a limit would have when each request arrives.

    At least one token of a prompt is always computed.
    """
    seen: set[int] = set()
    cached = 0
    for request in requests:
        found = next((i for i, value in enumerate(request.hashes) if value not in seen), len(request.hashes))
        cached += min(found, (request.prompt_tokens - 1) // request.block_size) * request.block_size
        seen.update(request.hashes)
    return cached / sum(request.prompt_tokens for request in requests)
