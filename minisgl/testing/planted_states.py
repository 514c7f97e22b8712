"""Bugs of recurrent states, as patches of `cache=states` and of the scheduler, each with a small workload."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import msgspec
import numpy as np

from minisgl.core import I32, EngineSpec, Req, Step
from minisgl.plugins.cache.base import Key, MatchResult
from minisgl.plugins.cache.prefix import PrefixCacheManager
from minisgl.plugins.cache.radix import RadixCache
from minisgl.plugins.cache.states import Prefix, StatesCache, StatesManager
from minisgl.testing import drive
from minisgl.testing.drive import Drive, Job, make_plugin
from minisgl.testing.planted import ABORTED, ArrivalOrderPolicy, job, pool_rows_freed_in_flight

__all__ = ["PLANTED_STATES", "PlantedState"]

Bug = AbstractContextManager[Any]


@dataclass(frozen=True)
class PlantedState:
    """A bug, and a workload that reveals it: the fields are those of `minisgl.testing.planted.Planted`.

    ``snapshots`` and ``spacing`` are options of `cache=states`; with ``cache`` another, there are none.
    """

    plant: Callable[[], Bug]
    clients: Sequence[Job]
    rule: str = "state"
    max_running_requests: int = 4
    cache: str = "states"
    snapshots: int = 8
    spacing: int = 4

    def run(self) -> Drive:
        """Run the workload. With the bug, raise the error that reports it."""
        spec = EngineSpec(4, 60, self.max_running_requests, 64, 50, has_states=True)
        options = {"spec": spec, "snapshots": self.snapshots, "spacing": self.spacing}
        cache = make_plugin("cache", self.cache, **(options if self.cache == "states" else {"page_size": 4}))
        run = Drive(spec, cache, ArrivalOrderPolicy(), max_prefill_tokens=10)
        run.run(self.clients)
        return run


def hit_without_state() -> Bug:
    """Patch the cache manager: a cached prefix is reused, although no slot has its state."""
    return patch.object(drive, "make_manager", PrefixCacheManager)


def hit_beyond_the_state() -> Bug:
    """Patch the cache: a match has all cached pages, and the state of the last position with one is loaded."""
    stack = ExitStack()
    stack.enter_context(patch.object(StatesCache, "match", RadixCache.match))

    def admit(self: StatesManager, reqs: Sequence[Req], step: int) -> None:
        PrefixCacheManager.admit(self, reqs, step)
        for req in reqs:
            for _, prefix in self.cache.borders(req.prefix_match.key, 0, req.num_cached_pages * 4):
                if prefix in self.cache.slots:
                    self._loads[req.req_pool_idx] = self.cache.slots[prefix]

    stack.enter_context(patch.object(StatesManager, "admit", admit))
    return stack


def page_absorbed_twice() -> Bug:
    """Patch cache and manager: the last page of a match is computed again, on the state that has absorbed it."""
    real, stack = StatesCache.match, ExitStack()

    def match(self: StatesCache, key: Key) -> MatchResult:
        pages = max(len(real(self, key).pages) - 1, 0)
        return RadixCache.match(self, Key(key.namespace, key.ids[: pages * self.page_size]))

    def admit(self: StatesManager, reqs: Sequence[Req], step: int) -> None:
        PrefixCacheManager.admit(self, reqs, step)
        for req in reqs:
            end = (req.num_cached_pages + 1) * self.spec.page_size if req.num_cached_pages else 0
            for _, prefix in self.cache.borders(req.prefix_match.key, end - 1, end):
                self._loads[req.req_pool_idx] = self.cache.slots[prefix]

    stack.enter_context(patch.object(StatesCache, "match", match))
    stack.enter_context(patch.object(StatesManager, "admit", admit))
    return stack


def _steps(change: Callable[[StatesManager, Step, dict[str, Any]], None]) -> Bug:
    """Patch the manager: ``change`` changes the loads and saves of each step."""
    real = StatesManager.with_states

    def with_states(self: StatesManager, step: Step, reqs: Sequence[Req]) -> Step:
        step = real(self, step, reqs)
        fields = {"state_loads": step.state_loads, "state_saves": step.state_saves}
        change(self, step, fields)
        return msgspec.structs.replace(step, **fields)

    return patch.object(StatesManager, "with_states", with_states)


def save_at_unaligned_border() -> Bug:
    """Patch the manager: states are saved one token before the border."""

    def change(manager: StatesManager, step: Step, fields: dict[str, Any]) -> None:
        if step.state_saves is not None:
            rows, positions, slots = step.state_saves
            fields["state_saves"] = rows, positions - np.int32(1), slots

    return _steps(change)


def save_at_end_of_chunk() -> Bug:
    """Patch the manager: the state that is saved is that at the end of the chunk, not at the border."""

    def change(manager: StatesManager, step: Step, fields: dict[str, Any]) -> None:
        if step.state_saves is not None:
            rows, _, slots = step.state_saves
            fields["state_saves"] = rows, (step.num_computed_tokens + step.num_scheduled_tokens)[rows], slots

    return _steps(change)


def load_forgotten() -> Bug:
    """Patch the manager: a request goes on with the state that is in its slot."""
    return _steps(lambda manager, step, fields: fields.update(state_loads=None))


def load_one_step_late() -> Bug:
    """Patch the manager: states are loaded with the next step, when the request's first tokens are absorbed."""
    late: list[Any] = [None]

    def change(manager: StatesManager, step: Step, fields: dict[str, Any]) -> None:
        fields["state_loads"], late[0] = late[0], step.state_loads

    return _steps(change)


def loads_exchanged() -> Bug:
    """Patch the manager: of two requests that are admitted together, each gets the other's state."""

    def change(manager: StatesManager, step: Step, fields: dict[str, Any]) -> None:
        if step.state_loads is not None:
            slots, rows = step.state_loads
            fields["state_loads"] = slots[::-1].copy(), rows

    return _steps(change)


def state_shared() -> Bug:
    """Patch the manager: a request gets the state of the request in the row before it, which runs."""

    def change(manager: StatesManager, step: Step, fields: dict[str, Any]) -> None:
        loads = step.state_loads
        if loads is not None:
            others = [row for row in manager.request_table.req_pool_indices.tolist() if row not in loads[1]]
            if others:
                fields["state_loads"] = np.full(len(loads[0]), 4 + 1 + others[0], np.int32), loads[1]

    return _steps(change)


def _borders(prefix_of: Callable[[Key, int, int], Prefix]) -> Bug:
    """Patch the cache: ``prefix_of`` (key, border, spacing) says what a saved state belongs to."""

    def borders(self: StatesCache, key: Key, start: int, end: int) -> Iterator[tuple[int, Prefix]]:
        for border in range(self.spacing, end + 1, self.spacing):
            if border > start:
                yield border, prefix_of(key, border, self.spacing)

    return patch.object(StatesCache, "borders", borders)


def _hash(ids: I32) -> bytes:
    return hashlib.sha256(ids.tobytes()).digest()


def state_of_another_prefix() -> Bug:
    """Patch the cache: a saved state belongs to the tokens since the last border, whatever came before them."""
    return _borders(lambda key, border, spacing: (key.namespace, _hash(key.ids[border - spacing : border])))


def state_of_another_client() -> Bug:
    """Patch the cache: a saved state is found without the request's ``cache_salt``."""
    return _borders(lambda key, border, spacing: (None, _hash(key.ids[:border])))


def replaced_state_still_found() -> Bug:
    """Patch the cache: a slot is given to another prefix, but the old one is not forgotten."""
    real = StatesCache.take

    def take(self: StatesCache, prefix: Prefix) -> int | None:
        before = dict(self.slots)
        slot = real(self, prefix)
        for old in before:
            if old not in self.slots:
                self.slots[old] = before[old]
        return slot

    return patch.object(StatesCache, "take", take)


def saved_over_the_loaded_state() -> Bug:
    """Patch the cache: a longer prefix gets the slot of the state that was used last, which is not copied first."""
    real = StatesCache.take

    def take(self: StatesCache, prefix: Prefix) -> int | None:
        last = next(reversed(self.slots.values()), None)
        slot = real(self, prefix)
        if slot is not None and last is not None:
            self.slots[prefix] = slot = last
        return slot

    return patch.object(StatesCache, "take", take)


def matched_before_it_was_saved() -> Bug:
    """Patch the manager: the last state of each step is noted as saved, but the step does not save it."""

    def change(manager: StatesManager, step: Step, fields: dict[str, Any]) -> None:
        if step.state_saves is not None:
            fields["state_saves"] = tuple(column[:-1].copy() for column in step.state_saves)

    return _steps(change)


def any_state_matches() -> Bug:
    """Patch the cache: matches have no pages of other tokens, but the state of any prefix that was saved last."""

    def match(self: StatesCache, key: Key) -> MatchResult:
        found = RadixCache.match(self, key)
        for border, prefix in self.borders(key, 0, len(found.pages) * self.page_size):
            self.slots[prefix] = next(reversed(self.slots.values()), border)
        return found

    return patch.object(StatesCache, "match", match)


SHARED = [
    job(1, 22, 8),
    job(2, 27, 8, arrive=9),
    job(3, 9, 8, first=9, arrive=2),
    job(4, 22, 8, arrive=30),
    job(5, 18, 8, arrive=30),
]
TOGETHER = [job(1, 22, 3), job(2, 22, 3, first=9), job(3, 24, 8, arrive=20), job(4, 23, 8, first=9, arrive=20)]
SAME_BLOCK = [
    Job(uid, [*start, *[7, 8, 9, 10], *range(20, 20 + uid)], job(1, 4).params, arrive=12 * uid)
    for uid, start in enumerate(([1, 2, 3, 4], [5, 6, 7, 8], [5, 6, 7, 8]), 1)
]
SALTED = [job(uid, 22, 8, arrive=12 * uid, cache_salt="ab"[uid % 2]) for uid in range(1, 5)]
MANY = [job(uid, 14, 3, first=(7 * uid) % 21, arrive=8 * uid) for uid in range(1, 10)]

PLANTED_STATES: dict[str, PlantedState] = {
    "a prefix hit without a state": PlantedState(hit_without_state, SHARED, cache="radix"),
    "a hit beyond the position of the state": PlantedState(hit_beyond_the_state, SHARED, spacing=8),
    "a page absorbed twice": PlantedState(page_absorbed_twice, SHARED),
    "a state saved at an unaligned border": PlantedState(save_at_unaligned_border, SHARED),
    "a state saved at the end of the chunk": PlantedState(save_at_end_of_chunk, SHARED),
    "a state that is not loaded": PlantedState(load_forgotten, SHARED),
    "a state loaded one step late": PlantedState(load_one_step_late, SHARED),
    "states of two requests exchanged": PlantedState(loads_exchanged, TOGETHER),
    "a slot that another request got": PlantedState(state_shared, SHARED),
    "a state of another prefix": PlantedState(state_of_another_prefix, SAME_BLOCK),
    "a state of another client": PlantedState(state_of_another_client, SALTED),
    "a replaced state that is still found": PlantedState(replaced_state_still_found, MANY, snapshots=2),
    "a state saved over the one that was loaded": PlantedState(saved_over_the_loaded_state, SHARED),
    "a state found that was not saved": PlantedState(matched_before_it_was_saved, SHARED),
    "the state that was saved last": PlantedState(any_state_matches, SHARED, spacing=8),
    "a slot given back while a launched step may write it": PlantedState(
        pool_rows_freed_in_flight, ABORTED, "row-in-flight", max_running_requests=2
    ),
}
"""Description of each bug → the bug and its workload."""
