"""KV events: which blocks of tokens a server's prefix cache stores and removes, and the hashes of blocks.

`plugins/observer/kv_events.py` publishes the messages, and a router reads them (`minisgl.cluster.routing`). They are
those of vLLM 0.28, as `docs/operation/kv-events.md` describes them. A *block* is a KV page.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from typing import TypeAlias

import msgspec
import numpy as np

from minisgl.core import I32


class Event(msgspec.Struct, tag=True, omit_defaults=True):
    """An event: a map with the name of its class as ``type``. The names and the order of its fields are vLLM's."""


class BlockStored(Event):
    """Blocks that were stored, each after the one before it: the first one after ``parent_block_hash``.

    ``token_ids`` are those of all blocks, ``block_size`` for each. ``extra_keys`` has an entry for each block: None, or
    what its hash covers besides its tokens, which is the ``cache_salt`` in the first block of a prompt.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[str] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class BlockRemoved(Event):
    """Blocks that were removed, in any order."""

    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(Event):
    """The cache is empty."""


AnyEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True):
    """One message: an array of a time in seconds since 1970, the events in order, and the rank, which is 0."""

    ts: float
    events: Sequence[AnyEvent]
    data_parallel_rank: int | None


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(EventBatch)


def encode(events: Sequence[AnyEvent]) -> bytes:
    """Return a message with these events."""
    return _encoder.encode(EventBatch(time.time(), events, 0))


def decode(message: bytes) -> Sequence[AnyEvent]:
    """Return the events of a message. Raise `msgspec.MsgspecError` if the bytes are no such message."""
    return _decoder.decode(message).events


def root_hash(seed: int) -> int:
    """Return the hash that takes the place of a first block's parent."""
    return int.from_bytes(hashlib.sha256(str(seed).encode()).digest()[:8], "big")


def block_hashes(parent: int, tokens: I32, block_size: int, salt: bytes = b"") -> list[int]:
    """Return the hash of each block of ``tokens``: the first 8 bytes of a SHA-256, as an unsigned number.

    It is the SHA-256 of the parent's hash (8 bytes, big-endian), the block's tokens (4 bytes each, little-endian), and,
    for the first block of ``tokens``, ``salt``.
    """
    data, size, sha256 = tokens.astype("<i4").tobytes(), 4 * block_size, hashlib.sha256
    digest, digests = parent.to_bytes(8, "big"), []
    for start in range(0, len(data), size):
        digest = sha256(digest + data[start : start + size] + salt).digest()[:8]
        digests.append(digest)
        salt = b""
    hashes: list[int] = np.frombuffer(b"".join(digests), ">u8").tolist()
    return hashes
