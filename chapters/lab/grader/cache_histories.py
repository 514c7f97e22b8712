"""Histories of a prefix cache, for the gates of lab `radix`: lists of events, each checked against a dictionary.

The dictionary is `minisgl.testing.cache.CacheModel`. A history calls only the methods of a cache that the scheduler
calls.

The namespace of a history is one of `SPACES`; an event may name another one of them with a number after its token ids,
which is added to the index of the history's namespace. All token ids are counted from ``base`` in steps of ``step``,
because caches with other number types than int32 round large ids or drop their upper bits, and the numbers of pages
from the lower 20 bits of ``base``.

The events: ``["insert", ids]``, ``["match", ids]``, ``["lock", name, ids]``, ``["lock_after", name, ids, other]``
(another match before the lock), ``["again", name, other]`` (one more lock through the handle of another lock),
``["grow", name, ids]`` (the prefix that a lock holds becomes longer), ``["unlock", name]``, ``["evict", pages]``,
``["match_other", ids]`` (a match in another namespace). ``name`` is a number that identifies a lock.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from functools import cache
from inspect import signature
from typing import Any

import numpy as np

from minisgl.chapters.lab.grader.gate import Broken, Invalid, amount
from minisgl.plugins.cache.base import Key
from minisgl.testing.cache import CacheModel, Prefix

__all__ = ["History", "show_history"]

CHECKED = {
    "eviction can't find": "not-offered",
    "nodes, ": "nodes",
    "more users than its root": "lock-path",
    "does not lead to the node": "split-links",
    "wrong parent or key": "split-links",
    "a page is in the tree twice": "split-links",
    "total_pages is": "counts",
}
"""Words of an assertion of the skeleton's `check` → the cause."""
SPACES: tuple[Hashable, ...] = (None, "", 0, "0", 1, "1", "None", "another", -1, -2)
"""Namespaces. Some are falsy, some print alike, and the last two have the same hash; all are different."""
POOL = 400
"""The number of pages that a history may allocate; no history of the gates needs more."""


@cache
def _least_arguments(kind: str) -> int:
    """Return how many arguments an event of this kind has at least: a shrunk one may have fewer."""
    arguments = list(signature(getattr(History, kind)).parameters.values())[1:]
    return sum(argument.default is argument.empty for argument in arguments)


class History:
    """A cache, and the dictionary that says what the cache must answer.

    ``part`` is the part of the lab that is graded. Failures without a more precise cause get a cause of that part.
    """

    def __init__(self, cache: Any, page_size: int, part: str, space: int = 0, base: int = 0, step: int = 1):
        self.cache, self.model, self.page_size, self.part = cache, CacheModel(page_size), page_size, part
        self.space_index, self.space, self.base, self.step = space, _space(space), base, step
        self.held: dict[int, tuple[Any, Prefix]] = {}  # name of a lock -> (handle, locked prefix)
        self.free = list(range(base & 0xFFFFF, (base & 0xFFFFF) + POOL))
        self.event = 0
        self.gained = 0  # number of pages that the most recent lock gave their first user
        self.matched: list[tuple[Any, Any, list[int]]] = []  # handle, array and pages of the matches since a change
        self.offered: dict[int, list[int]] = {}  # number of an event -> the pages that it offered to the cache

    def broken(self, cause: str, promise: str, seen: str, page: int | None = None) -> Broken:
        """Return a finding at the current event."""
        return Broken(cause, promise, seen, step=self.event, page=page)

    def run(self, events: list[list[Any]]) -> None:
        """Apply all events and check the cache after each. Raise `Broken` at the first wrong answer."""
        try:
            self.apply(events)
        except Broken as broken:
            place = {"space": self.space_index, "base": self.base, "step": self.step}
            workload = {"page_size": self.page_size, **place, "events": events}
            broken.show = show_history(workload, self.offered)
            raise

    def apply(self, events: list[list[Any]]) -> None:
        """Apply all events and check the cache after each."""
        for self.event, (kind, *args) in enumerate(events, 1):
            act = getattr(self, kind)
            if len(args) < _least_arguments(kind):
                raise Invalid
            if kind not in ("match", "match_other"):
                self.matched = []  # from here on, results of earlier matches need not be valid
            try:
                act(*args)
                self.counts(kind)
            except AssertionError as error:
                promise = "The cache's own assertions hold."
                seen = f"In `{kind}`: {error or 'an assertion failed'}."
                raise self.broken(self.cause(kind), promise, seen) from error
            try:
                self.cache.check()
            except AssertionError as error:
                raise self.inconsistent(kind, error) from error

    def inconsistent(self, kind: str, error: AssertionError) -> Broken:
        """Return the finding for an error of the cache's own check after an event. Its text tells the cause."""
        cause = next((cause for words, cause in CHECKED.items() if words in str(error)), self.cause(kind))
        if kind == "match":
            cause = "match-writes"
        promise = "The cache's own check (`check`) finds no error."
        return self.broken(cause, promise, f"After `{kind}`: {error or 'an assertion failed'}.")

    def cause(self, kind: str) -> str:
        """Return the cause for a failed event if no better one is known."""
        if self.part == "lock" or kind in ("lock", "lock_after", "unlock", "grow", "again"):
            return "lock-path"
        return "split-links" if self.part == "split" else "counts"

    # ---- events ------------------------------------------------------------------------------------------

    def key(self, ids: list[int], space: int = 0) -> tuple[Key, Prefix]:
        """Return the cache's key for token ids, and the dictionary's key for their whole pages."""
        whole = len(ids) // self.page_size * self.page_size
        named = _space(self.space_index + space)
        numbers = np.asarray(ids, np.int32) * np.int32(self.step) + np.int32(self.base)
        return Key(named, numbers), Prefix(space, tuple(ids[:whole]))

    def match(self, ids: list[int], space: int = 0) -> tuple[Any, Prefix]:
        """Match a prefix and return its handle and the matched prefix."""
        key, prefix = self.key(ids, space)
        expected = self.model.match(prefix)
        path = [self.model.pages[part] for part in self.model.path(expected)]
        nodes = getattr(self.cache, "_nodes", None)
        tokens = key.ids.copy()
        found, right = self.cache.match(key), [page.number for page in path]
        if not np.array_equal(key.ids, tokens):
            raise self.broken(
                "changes",
                "The cache does not change the arrays that it is given.",
                "`match` changed the array of the token ids.",
            )
        if getattr(self.cache, "_nodes", None) != nodes:
            seen = f"The tree had {nodes} nodes before a match, and has {self.cache._nodes} after it."
            raise self.broken("match-writes", "A match changes neither the tree nor the order of eviction.", seen)
        try:
            self.cache.check()
        except AssertionError as error:
            raise self.inconsistent("match", error) from error
        pages = list(found.pages)
        self.check_dtype("match", found.pages)
        if pages != right:
            promise = "`match` finds the longest cached prefix, in whole pages."
            seen = (
                f"For {_tokens(ids, self.page_size)} the cache holds pages {right}; `match` returned "
                f"{[int(page) for page in pages]}."
            )
            raise self.broken(self.match_cause(pages, right, prefix), promise, seen)
        for handle, array, numbers in self.matched:
            now = [int(page) for page in array]
            if now != numbers or (handle is found.handle and numbers != right):
                what = f"its array holds the pages {now}" if now != numbers else "its handle is the one of this match"
                seen = f"An earlier match returned pages {numbers}. After this match, {what}."
                raise self.broken("shared-result", "The result of a match is valid until the cache changes.", seen)
        self.matched.append((found.handle, found.pages, right))
        unlocked = sum(page.users == 0 for page in path)
        if found.unlocked != unlocked:
            promise = "`MatchResult.unlocked` is the number of matched pages that have no user."
            seen = f"Matched pages: {len(right)}, without a user: {unlocked}; `unlocked` is {found.unlocked}."
            raise self.broken("unlocked", promise, seen)
        return found.handle, expected

    def check_dtype(self, method: str, pages: Any) -> None:
        """Check that an array of pages is one of int32: the scheduler copies it into its page table."""
        if not isinstance(pages, np.ndarray) or pages.dtype != np.int32:
            promise = f"`{method}` returns the pages as a numpy array of int32, also if there are none."
            kind = f"an array of {pages.dtype}" if isinstance(pages, np.ndarray) else f"a {type(pages).__name__}"
            raise self.broken("dtype", promise, f"It returned {amount(len(pages), 'page')} as {kind}.")

    def match_other(self, ids: list[int]) -> None:
        """Match the same tokens in another namespace, in which nothing is cached."""
        for other in SPACES:
            found = [int(page) for page in self.cache.match(Key(other, self.key(ids)[0].ids)).pages]
            if found and other != self.space:
                cached = f"pages {found}, which were inserted in the namespace {self.space!r}"
                seen = f"A match of {_tokens(ids, self.page_size)} in the empty namespace {other!r} returned {cached}."
                raise self.broken("namespace", "A match finds only prefixes of its own namespace.", seen)

    def match_cause(self, pages: list[int], right: list[int], prefix: Prefix) -> str:
        """Return the cause of a wrong match."""
        if self.part != "match":
            return self.cause("match")
        if pages[: len(right)] == right or pages != right[: len(pages)]:
            return "match-long"
        return "whole-prompt" if not pages and len(right) * self.page_size < len(prefix.ids) else "match-short"

    def insert(self, ids: list[int], space: int = 0) -> None:
        """Insert a prefix from the root."""
        handle, prefix = self.store(None, ids, space)
        if self.part == "evict":  # a lock and an unlock: the whole prefix counts as used now in every implementation
            self.cache.lock(handle)
            self.cache.unlock(handle)
            self.model.lock(prefix)
            self.model.lock(prefix, -1)

    def store(self, base: tuple[Any, Prefix] | None, ids: list[int], space: int = 0) -> tuple[Any, Prefix]:
        """Insert the pages of ``ids`` below ``base`` and return the handle and the prefix."""
        key, prefix = self.key(ids, space)
        start = len(base[1].ids) // self.page_size if base else 0
        want = len(prefix.ids) // self.page_size - start
        if want > len(self.free):
            raise Invalid
        mine, self.free = self.free[:want], self.free[want:]
        self.offered[self.event] = mine
        offered, tokens = np.asarray(mine, np.int32), key.ids.copy()
        inserted = self.cache.insert(base[0] if base else None, key, start, offered)
        if offered.tolist() != mine or not np.array_equal(key.ids, tokens):
            seen = "`insert` changed the array of the offered pages or of the token ids."
            raise self.broken("changes", "The cache does not change the arrays that it is given.", seen)
        key.ids[:], offered[:] = 0, 0  # the caller may write to its arrays, and uses them again
        held = self.model.insert(prefix, start, mine)
        if list(inserted.pages) != held:
            promise = "`insert` returns the pages that the cache holds for the prefix from now on."
            returned = [int(page) for page in inserted.pages]
            seen = f"Pages {mine} were offered. The cache must hold {held}; `insert` returned {returned}."
            cause = {"split": "split-links"}.get(self.part, "frees-before-remap")
            if base and self.part == "lock":  # inserts from the root passed earlier: the lock's handle must be wrong
                cause = "lock-too-much"
            raise self.broken(cause, promise, seen)
        self.free += sorted(set(mine) - set(held))
        return inserted.handle, prefix

    def again(self, name: int, other: int) -> None:
        """Lock the prefix of another lock once more, through the same handle."""
        if name in self.held or other not in self.held:
            raise Invalid
        handle, prefix = self.held[other]
        self.gained = 0
        self.cache.lock(handle)
        self.model.lock(prefix)
        self.held[name] = handle, prefix

    def lock(self, name: int, ids: list[int], space: int = 0) -> None:
        """Match a prefix and lock it."""
        if name in self.held:
            raise Invalid
        handle, prefix = self.match(ids, space)
        self.gained = sum(self.model.pages[part].users == 0 for part in self.model.path(prefix))
        self.cache.lock(handle)
        self.model.lock(prefix)
        self.held[name] = handle, prefix

    def lock_after(self, name: int, ids: list[int], other: list[int]) -> None:
        """Match a prefix, then another one, and lock the first."""
        if name in self.held:
            raise Invalid
        handle, prefix = self.match(ids)
        self.match(other)
        self.gained = sum(self.model.pages[part].users == 0 for part in self.model.path(prefix))
        self.cache.lock(handle)
        self.model.lock(prefix)
        self.held[name] = handle, prefix

    def grow(self, name: int, more: list[int]) -> None:
        """Insert more pages below a locked prefix and move the lock to the longer prefix.

        The scheduler does the same after a prompt was computed.
        """
        base = self.pop_lock(name)
        space: Any = base[1].namespace
        longer = self.store(base, [*base[1].ids, *more], space)
        self.cache.lock(longer[0])
        self.model.lock(longer[1])
        self.cache.unlock(base[0])
        self.model.lock(base[1], -1)
        self.held[name] = longer

    def unlock(self, name: int) -> None:
        """Unlock a locked prefix."""
        handle, prefix = self.pop_lock(name)
        self.cache.unlock(handle)
        self.model.lock(prefix, -1)

    def pop_lock(self, name: int) -> tuple[Any, Prefix]:
        """Remove a lock from ``held`` and return it. Raise `Invalid` if there is no such lock."""
        if name not in self.held:
            raise Invalid
        return self.held.pop(name)

    def evict(self, count: int) -> None:
        """Evict ``count`` pages."""
        if count < 0:
            raise Invalid
        before, evictable = dict(self.model.pages), self.model.evictable_pages
        numbers = {page.number: prefix for prefix, page in before.items()}
        evicted = self.cache.evict(count)
        gone = [int(page) for page in evicted]
        self.check_dtype("evict", evicted)
        for page in gone:
            if page not in numbers or gone.count(page) > 1:
                seen = f"`evict` returned pages {gone}; page {page} is not the cache's, or is in the list twice."
                raise self.broken("counts", "`evict` returns pages that the cache owns, each once.", seen, page)
            if before[numbers[page]].users:
                seen = f"Page {page} was evicted; it still has {amount(before[numbers[page]].users, 'lock')}."
                raise self.broken("evict-locked", "Locked pages are not evicted.", seen, page)
        if len(gone) > (count + SLIGHTLY if count else 0):
            seen = f"`evict` was asked for {amount(count, 'page')} and evicted {len(gone)}."
            raise self.broken("evict-many", "`evict` evicts about as many pages as asked for.", seen)
        if len(gone) < min(count, evictable):
            seen = f"`evict` was asked for {amount(count, 'page')} and evicted {len(gone)}; evictable: {evictable}."
            raise self.broken("evict-few", "`evict` evicts as many pages as asked for, if they are evictable.", seen)
        rest = {prefix for prefix in before if before[prefix].number not in gone}
        for prefix in rest:
            if any(part not in rest for part in self.model.path(prefix)):
                page = next(p for p in gone if numbers[p] in list(self.model.path(prefix)))
                seen = f"Page {page} was evicted; page {before[prefix].number}, which follows it in a prefix, was not."
                raise self.broken("evict-middle", "A prefix is evicted from its end.", seen, page)
        right = self.model.evict(len(gone))
        if set(gone) != right:
            seen = f"Pages {sorted(gone)} were evicted; the least recently used pages were {sorted(right)}."
            raise self.broken("evict-order", "The least recently used pages are evicted first.", seen)
        self.free += gone

    def counts(self, kind: str) -> None:
        """Compare ``total_pages`` and ``evictable_pages`` with the dictionary."""
        if self.cache.total_pages != len(self.model.pages):
            reported = self.cache.total_pages
            holds = amount(len(self.model.pages), "page")
            seen = f"After `{kind}` the cache holds {holds}; `total_pages` is {reported}."
            raise self.broken("counts", "`total_pages` is the number of pages that the cache holds.", seen)
        right, reported = self.model.evictable_pages, self.cache.evictable_pages
        if reported != right:
            cause = self.cause(kind)
            if kind in ("lock", "lock_after") and reported < right:  # pages with a user were subtracted again
                cause = "lock-too-much" if self.gained else "split-users"
            seen = f"After `{kind}`, the number of pages without a user is {right}; `evictable_pages` is {reported}."
            raise self.broken(cause, "`evictable_pages` is the number of pages without a user.", seen)


SLIGHTLY = 4
"""How many pages more than asked for `evict` may evict: a cache may evict only whole edges, and these are short."""


def _space(index: int) -> Hashable:
    return SPACES[index % len(SPACES)]


def _tokens(ids: list[int], page_size: int) -> str:
    pages = [" ".join(map(str, ids[i : i + page_size])) for i in range(0, len(ids), page_size)]
    return f"[{' | '.join(pages)}]"


def show_history(workload: dict[str, Any], offered: Mapping[int, list[int]] | None = None) -> str:
    """Describe a history in one line per event, with the token ids grouped by pages.

    ``offered``: the pages that the event with a number offered to the cache, if the history has been played.
    """
    size = workload["page_size"]
    space, base = _space(workload.get("space", 0)), workload.get("base", 0)
    step = workload.get("step", 1)
    counted = f", token ids counted from {base}" * bool(base or step > 1) + f" in steps of {step}" * (step > 1)
    more = f", namespace {space!r}" * (space is not None) + counted
    lines = [f"a new cache, pages of {amount(size, 'token')}{more}"]
    for number, (kind, *args) in enumerate(workload["events"], 1):
        names = {"insert": 1, "match": 1, "lock": 2}.get(kind, len(args))
        where = [f"with the namespace {_space(workload.get('space', 0) + space)!r}" for space in args[names:]]
        shown = [_tokens(arg, size) if isinstance(arg, list) else str(arg) for arg in args[:names]] + where
        named = {
            "match_other": "match in another namespace",
            "again": "lock again",
        }.get(kind, kind)
        if kind == "lock_after":
            name, first, second = shown
            named, shown = f"match {first}, then {second}, and lock the first", [f"as lock {name}"]
        pages = (offered or {}).get(number)
        shown += [f"as page{'s' * (len(pages) > 1)} {' '.join(map(str, pages))}"] if pages else []
        lines.append(f"{number}. {named} {' '.join(shown)}")
    return "\n".join(lines)
