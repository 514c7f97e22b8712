"""`cache=states`: a radix cache for models with recurrent states, which also keeps copies of states at some positions.

A layer of linear attention has no KV that a later request could read, but one state, which has absorbed all tokens so
far: docs/design/states.md. So a cached prefix can be reused only up to a position at which a copy of the state was
kept. While a prompt is computed, its state is copied at each multiple of ``spacing`` tokens into a slot. A request
whose prompt has the same tokens up to there gets a copy of this copy in its own slot, and goes on from it.

Loads take effect before the forward pass of a step, saves within it, and steps take effect in the order of their
launch. So a slot can be given to another prefix at any time: a step that loads it was launched before.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from minisgl.config import ConfigError
from minisgl.core import EngineSpec, Req, Step
from minisgl.hooks import hookimpl
from minisgl.plugins.cache import compare
from minisgl.plugins.cache.base import Key, MatchResult
from minisgl.plugins.cache.prefix import PrefixCacheManager
from minisgl.plugins.cache.radix import RadixCache
from minisgl.scheduler.observer import Observer

Prefix = tuple[Hashable, bytes]
"""A namespace and a hash of all tokens of a prefix, of which no client can make two equal ones (BLAKE2b, 256 bits)."""


@dataclass
class States:
    """A radix cache for models with recurrent states: a prefix is reused up to the last position with a saved state."""

    snapshots: int = 32
    """Number of saved states, each as large as the state of a running request. The least recently used are replaced."""
    spacing: int = 256
    """Tokens between two positions of a prompt at which its state is saved, a multiple of ``page_size``. A prefix that
    is shorter is not reused. Smaller values reuse more of a prefix and use up ``snapshots`` sooner."""

    def build(self, spec: EngineSpec) -> StatesCache:
        if not spec.has_states:
            raise ConfigError("it is for models with recurrent states, which this one lacks. Use cache=radix.")
        if self.snapshots < 1 or self.spacing < 1 or self.spacing % spec.page_size:
            raise ConfigError(
                f"cache.snapshots={self.snapshots} must be positive, and cache.spacing={self.spacing} a multiple of "
                f"page_size={spec.page_size}."
            )
        return StatesCache(spec, self.snapshots, self.spacing)


class StatesCache(RadixCache):
    """A radix cache whose matches end at a saved state. The first of its slots follows the engine's scratch row."""

    def __init__(self, spec: EngineSpec, snapshots: int, spacing: int):
        super().__init__(spec.page_size)
        self.common_pages = compare.pick_common_pages("auto")
        self.spacing, first = spacing, spec.max_running_requests + 1
        self.free = list(range(first, first + snapshots))
        self.slots: OrderedDict[Prefix, int] = OrderedDict()  # saved states, the least recently used first

    def make_manager(self, spec: EngineSpec, cache: StatesCache, events: Observer) -> StatesManager:
        """Return the manager that loads and saves states."""
        return StatesManager(spec, cache, events)

    def match(self, key: Key) -> MatchResult:
        """Return the longest cached prefix of ``key`` whose state is saved."""
        found = super().match(key)
        cached, end = len(found.pages) * self.page_size, 0
        for border, prefix in self.borders(key, 0, cached):
            if prefix in self.slots:
                end = border
        return found if end == cached else super().match(Key(key.namespace, key.ids[:end]))

    def rematch(self, key: Key, last: MatchResult) -> MatchResult:
        """Return ``match(key)``."""
        return self.match(key)

    def borders(self, key: Key, start: int, end: int) -> Iterator[tuple[int, Prefix]]:
        """Yield the positions after ``start`` up to ``end`` at which states are saved, and the prefix of each."""
        hashed = hashlib.blake2b(digest_size=32)
        for border in range(self.spacing, end + 1, self.spacing):
            hashed.update(key.ids[border - self.spacing : border].tobytes())
            if border > start:
                yield border, (key.namespace, hashed.digest())

    def take(self, prefix: Prefix) -> int | None:
        """Return a slot for the state of ``prefix``, or None if it is saved already. The state counts as used now."""
        if prefix in self.slots:
            self.slots.move_to_end(prefix)
            return None
        slot = self.slots[prefix] = self.free.pop() if self.free else self.slots.popitem(last=False)[1]
        return slot


class StatesManager(PrefixCacheManager):
    """A `PrefixCacheManager` that also loads and saves recurrent states with the steps."""

    cache: StatesCache

    def __init__(self, spec: EngineSpec, cache: StatesCache, events: Observer):
        super().__init__(spec, cache, events)
        self._loads: dict[int, int] = {}  # req_pool_idx -> slot, of requests that the next step admits

    def admit(self, reqs: Sequence[Req], step: int) -> None:
        """Admit the requests, and load the state of each cached prefix."""
        super().admit(reqs, step)
        for req in reqs:
            end = req.num_cached_pages * self.spec.page_size
            for _, prefix in self.cache.borders(req.prefix_match.key, end - 1, end):
                self.cache.slots.move_to_end(prefix)
                self._loads[req.req_pool_idx] = self.cache.slots[prefix]

    def release(self, reqs: Sequence[Req]) -> None:
        """Release the requests. A request that no step has admitted needs no state any more."""
        for req in reqs:
            self._loads.pop(req.req_pool_idx, None)
        super().release(reqs)

    def flush(self) -> int:
        """Forget the saved states, too."""
        self.cache.free += self.cache.slots.values()
        self.cache.slots.clear()
        self._version += 1
        return super().flush()

    def with_states(self, step: Step, reqs: Sequence[Req]) -> Step:
        """Return the step with the states to load, and those to save where its prefill chunks reach a border."""
        saves = []
        for row in range(step.num_continuing, step.rows):
            start = int(step.num_computed_tokens[row])
            key = Key(reqs[row].params.cache_salt, reqs[row].prefix_match.ids)
            for border, prefix in self.cache.borders(key, start, start + int(step.num_scheduled_tokens[row])):
                if (slot := self.cache.take(prefix)) is not None:
                    saves.append((row, border, slot))
        if saves:
            self._version += 1  # a match may end later now, or, if another state was replaced, earlier
        loads, self._loads = self._loads, {}
        changes: dict[str, Any] = {}
        if loads:
            changes["state_loads"] = np.array([*loads.values()], np.int32), np.array([*loads], np.int32)
        if saves:
            changes["state_saves"] = tuple(np.array(column, np.int32) for column in zip(*saves, strict=True))
        return msgspec.structs.replace(step, **changes) if changes else step


@hookimpl
def minisgl_configs() -> Iterator[tuple[str, str, type]]:
    yield "cache", "states", States
