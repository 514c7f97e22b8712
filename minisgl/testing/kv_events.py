"""Rebuilds the content of a prefix cache from the messages of ``plugins/observer/kv_events.py``, and compares both.

`CacheContent` knows the messages' bytes only. It shares no code with the plugin, so it has hashes of its own.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import msgspec
import numpy as np
import pluggy

from minisgl import hooks
from minisgl.cluster.kv_events import encode
from minisgl.core import EngineSpec, Output
from minisgl.plugins.cache.base import Key, PrefixCache
from minisgl.scheduler.base import SchedulerPolicy
from minisgl.testing.drive import Drive

__all__ = ["CacheContent", "KVEventsDrive"]

SEED = 7
"""Seed of the block hashes."""


class _Block(msgspec.Struct):
    parent: int | None
    tokens: list[int]
    salt: str | None  # of the whole prefix


class CacheContent:
    """The blocks that the messages so far leave in the cache, by hash. Raise AssertionError for a wrong message."""

    def __init__(self, block_size: int, seed: int):
        self.block_size = block_size
        self.blocks: dict[int, _Block] = {}
        self.messages = self.stored = self.removed = 0
        self._root = hashlib.sha256(str(seed).encode()).digest()[:8]

    def apply(self, message: bytes) -> None:
        """Apply the events of a message."""
        _, events, rank = msgspec.msgpack.decode(message)
        assert rank == 0, f"the message is from rank {rank}"
        for event in events:
            match event.pop("type"):
                case "BlockStored":
                    self._store(**event)
                case "BlockRemoved":
                    self._remove(**event)
                case "AllBlocksCleared":
                    self.blocks.clear()
                case other:
                    raise AssertionError(f"there is no event {other}")
        assert self.messages or events == [{}], "the first message does not say that the cache is empty"
        self.messages += 1
        # A message has the events of a whole turn. A removed block may follow or precede those below it.
        for value, block in self.blocks.items():
            assert block.parent is None or block.parent in self.blocks, f"the parent of block {value} was removed"

    def _store(
        self, block_hashes: list[int], parent_block_hash: int | None, token_ids: list[int], extra_keys: Any, **same: Any
    ) -> None:
        size = self.block_size
        assert same == {
            "block_size": size,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
        }
        assert block_hashes, "an event without blocks"
        assert len(token_ids) == size * len(block_hashes), "the tokens are not those of whole blocks"
        assert len(extra_keys) == len(block_hashes) and not any(extra_keys[1:]), "only a first block has extra keys"
        parent, keys = parent_block_hash, extra_keys[0] or []
        assert not keys or parent is None, "only the first block of a prompt has a salt"
        assert parent is None or parent in self.blocks, f"block {block_hashes[0]} has the unknown parent {parent}"
        salt = (keys[0] if keys else None) if parent is None else self.blocks[parent].salt
        for i, value in enumerate(block_hashes):
            tokens = token_ids[i * size : (i + 1) * size]
            assert value not in self.blocks, f"block {value} is stored twice"
            right = self._hash(parent, tokens, salt)
            assert value == right, f"the hash of the tokens {tokens} after {parent} with salt {salt} is not {value}"
            self.blocks[value] = _Block(parent, tokens, salt)
            parent = value
        self.stored += len(block_hashes)

    def _hash(self, parent: int | None, tokens: list[int], salt: str | None) -> int:
        data = struct.pack(f"<{len(tokens)}i", *tokens)
        if parent is None:
            data = self._root + data + (salt or "").encode()
        else:
            data = parent.to_bytes(8, "big") + data
        return int.from_bytes(hashlib.sha256(data).digest()[:8], "big")

    def _remove(self, block_hashes: list[int], **same: Any) -> None:
        assert same == {"medium": "GPU", "group_idx": 0}
        for value in block_hashes:
            assert value in self.blocks, f"block {value} is removed, but it is not stored"
            del self.blocks[value]
        self.removed += len(block_hashes)

    def prefixes(self) -> Iterator[Key]:
        """Yield the longest cached prefixes: those of the blocks that are no other block's parent."""
        parents = {block.parent for block in self.blocks.values()}
        for value in self.blocks.keys() - parents:
            path, at = [self.blocks[value]], self.blocks[value].parent
            while at is not None:
                path.append(self.blocks[at])
                at = path[-1].parent
            yield Key(path[0].salt, np.array([t for block in reversed(path) for t in block.tokens], np.int32))

    def check(self, cache: PrefixCache, total_pages: int) -> None:
        """Raise AssertionError if the cache, which has ``total_pages``, has other pages than the events say."""
        assert total_pages == len(self.blocks), (
            f"the cache has {total_pages} pages, and {len(self.blocks)} blocks by the events"
        )
        # Every block is in the cache, and there are as many blocks as pages. So every page of the cache is a block.
        for key in self.prefixes():
            found = len(cache.match(key).pages) * self.block_size
            assert found == len(key.ids), f"by the events, the cache has {key}; it has {found} tokens of it"


class _Recorder:
    """Takes the place of the plugin's Publisher: applies the messages instead of sending them."""

    replayer = None
    errors = 0

    def __init__(self, content: CacheContent):
        self._content = content

    @property
    def messages(self) -> int:
        return self._content.messages

    def publish(self, events: Any) -> None:
        self._content.apply(encode(events))

    def close(self) -> None:
        pass


class KVEventsDrive(Drive):
    """A `Drive` that rebuilds the cache's content from the KV events, and compares both after every step.

    Without ``thorough`` it compares them at the end only.
    """

    def __init__(self, spec: EngineSpec, cache: PrefixCache, policy: SchedulerPolicy, **options: Any):
        plugin = import_module("minisgl.plugins.observer.kv_events")
        self.content = CacheContent(spec.page_size, SEED)
        manager = pluggy.PluginManager(hooks.PROJECT)
        manager.add_hookspecs(hooks)
        self.observer = plugin.KVEvents(spec, SEED, _Recorder(self.content))
        manager.register(self.observer)
        super().__init__(spec, cache, policy, observers=manager.hook, **options)

    def step(self) -> Output:
        before = self.content.messages
        output = super().step()
        if self.thorough and (self.content.messages > before or len(self.content.blocks) != self.num_cached_pages):
            self.content.check(self.cache, self.num_cached_pages)
        return output

    def check_idle(self) -> None:
        super().check_idle()
        self.content.check(self.cache, self.num_cached_pages)
        self.report.stored_blocks, self.report.removed_blocks = self.content.stored, self.content.removed
        assert not self.observer._blocks._last, "the observer keeps state of requests that have ended"
