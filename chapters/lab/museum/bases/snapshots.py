"""A radix cache for models with recurrent states. It keeps copies of states, and a hit goes on with one of them.

While a prompt is computed, its state is copied at the end of each block of tokens. A prefix is reused up to the last
block whose state was copied. A block is longer than a page.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from minisgl.core import I32, EngineSpec, Req, Step
from minisgl.hooks import hookimpl
from minisgl.plugins.cache.base import Key, MatchResult
from minisgl.plugins.cache.prefix import PrefixCacheManager
from minisgl.plugins.cache.radix import RadixCache
from minisgl.scheduler.observer import Observer

Prefix = tuple[Hashable, bytes]
PAGES_OF_A_BLOCK = 2
COPIES = 24


@dataclass
class Snapshots:
    """A radix tree of pages, with copies of recurrent states at the ends of blocks."""

    def build(self, spec: EngineSpec) -> SnapshotCache:
        return SnapshotCache(spec)


class SnapshotCache(RadixCache):
    """A radix tree whose matches end with a block whose state was copied."""

    def __init__(self, spec: EngineSpec):
        super().__init__(spec.page_size)
        self.block_size = PAGES_OF_A_BLOCK * spec.page_size  # in tokens
        first = spec.max_running_requests + 1  # the slots before it have the states of running requests
        self.free = list(range(first, first + COPIES))
        self.slots: OrderedDict[Prefix, int] = OrderedDict()  # copies, the least recently used first

    def make_manager(self, spec: EngineSpec, cache: SnapshotCache, events: Observer) -> SnapshotManager:
        """Return the manager that copies states."""
        return SnapshotManager(spec, cache, events)

    def match(self, key: Key) -> MatchResult:
        """Return the longest cached prefix of ``key`` that ends with a block whose state was copied."""
        found, end = super().match(key), 0
        for border, prefix in self.blocks(key, 0, len(found.pages) * self.page_size):
            if prefix in self.slots:
                end = border
        return super().match(Key(key.namespace, key.ids[:end]))

    def rematch(self, key: Key, last: MatchResult) -> MatchResult:
        """Return ``match(key)``."""
        return self.match(key)

    def blocks(self, key: Key, start: int, end: int) -> Iterator[tuple[int, Prefix]]:
        """Yield the end of each block that ends after position ``start`` and up to ``end``, and its prefix."""
        hashed = hashlib.blake2b(digest_size=32)
        for border in range(self.block_size, end + 1, self.block_size):
            hashed.update(key.ids[border - self.block_size : border].tobytes())
            if border > start:
                yield border, (key.namespace, hashed.digest())

    def take(self, prefix: Prefix) -> int:
        """Return a slot for the copy of a state, which may be that of another prefix so far."""
        slot = self.slots[prefix] = self.free.pop() if self.free else self.slots.popitem(last=False)[1]
        return slot


class SnapshotManager(PrefixCacheManager):
    """Copies states with the steps. `block_table` has the slots of the copies, by request-pool row and block."""

    cache: SnapshotCache

    def __init__(self, spec: EngineSpec, cache: SnapshotCache, events: Observer):
        super().__init__(spec, cache, events)
        first = spec.max_running_requests + 1
        self.block_table: I32 = np.full((spec.max_running_requests, spec.max_seq_len), first, np.int32)
        self._loads: dict[int, int] = {}  # request-pool row -> slot, of requests that the next step admits

    def admit(self, reqs: Sequence[Req], step: int) -> None:
        """Admit the requests. A request with a hit goes on with the copy at its end."""
        super().admit(reqs, step)
        for req in reqs:
            row, end = req.req_pool_idx, req.num_cached_pages * self.spec.page_size
            for border, prefix in self.cache.blocks(req.prefix_match.key, 0, end):
                if prefix in self.cache.slots:  # copies of earlier blocks may be gone
                    self.block_table[row, border // self.cache.block_size - 1] = self.cache.slots[prefix]
                    if border == end:
                        self.cache.slots.move_to_end(prefix)
            if end:
                self._loads[row] = int(self.block_table[row, (end - 1) // self.cache.block_size])

    def release(self, reqs: Sequence[Req]) -> None:
        """Release the requests. A request that no step has admitted needs no state any more."""
        for req in reqs:
            self._loads.pop(req.req_pool_idx, None)
        super().release(reqs)

    def with_states(self, step: Step, reqs: Sequence[Req]) -> Step:
        """Return the step with the states that it copies: before it, and where its prefill chunks end a block."""
        saves = []
        for row in range(step.num_continuing, step.rows):
            start = int(step.num_computed_tokens[row])
            key = Key(reqs[row].params.cache_salt, reqs[row].prefix_match.ids)
            for border, prefix in self.cache.blocks(key, start, start + int(step.num_scheduled_tokens[row])):
                if prefix not in self.cache.slots:
                    slot = self.cache.take(prefix)
                    self.block_table[reqs[row].req_pool_idx, border // self.cache.block_size - 1] = slot
                    saves.append((row, border, slot))
        if saves:
            self._version += 1  # a match may end later now, or, if another copy was replaced, earlier
        loads, self._loads = self._loads, {}
        changes: dict[str, Any] = {}
        if loads:
            changes["state_loads"] = np.array([*loads.values()], np.int32), np.array([*loads], np.int32)
        if saves:
            changes["state_saves"] = tuple(np.array(column, np.int32) for column in zip(*saves, strict=True))
        return msgspec.structs.replace(step, **changes) if changes else step


@hookimpl
def minisgl_configs() -> Any:
    yield "cache", "museum", Snapshots
