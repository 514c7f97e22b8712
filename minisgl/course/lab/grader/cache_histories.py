"""A cache's life, for the gates of lab `radix`: a list of events, each judged by a dictionary
(`minisgl.testing.cache.CacheModel`), and drawn for a person. It asks the cache only what the scheduler may ask.

The events: ``["insert", ids]``, ``["match", ids]``, ``["lock", name, ids]``, ``["grow", name, ids]`` (what a lock holds
becomes longer), ``["unlock", name]``, ``["evict", pages]``, ``["elsewhere", ids]`` (a match in another namespace).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from minisgl.course.lab.grader.gate import Broken, Invalid
from minisgl.kvcache import Key
from minisgl.testing.cache import CacheModel, Prefix

__all__ = ["Life", "show_life"]

POOL = 400
"""Pages that a life may take; more is never needed."""


class Life:
    """A cache, and the dictionary beside it. ``part`` is what is on trial: what goes wrong is blamed on it."""

    def __init__(self, cache: Any, page_size: int, part: str):
        self.cache, self.model, self.page_size, self.part = cache, CacheModel(page_size), page_size, part
        self.held: dict[int, tuple[Any, Prefix]] = {}  # what was locked, by its name in the workload
        self.free = list(range(POOL))
        self.event = 0
        self.locked = False  # whether there ever was a lock
        self.gained = 0  # pages that got their first user by the last lock

    def broken(self, cause: str, promise: str, seen: str, page: int | None = None) -> Broken:
        return Broken(cause, promise, seen, step=self.event, page=page)

    def live(self, events: list[list[Any]]) -> None:
        """All events, each judged."""
        for self.event, (kind, *args) in enumerate(events, 1):
            act = getattr(self, kind)
            try:
                act(*args)
                self.counts(kind)
            except AssertionError as error:
                promise = "The cache's own assertions hold."
                raise self.broken(self.cause(kind), promise, f"{error or 'One failed'}, in `{kind}`.") from error
            try:
                self.cache.check()
            except AssertionError as error:
                promise = "The cache finds nothing wrong with itself (`check`)."
                cause = "not-offered" if "eviction can't find" in str(error) else self.cause(kind)
                raise self.broken(cause, promise, f"After `{kind}`: {error}.") from error

    def cause(self, kind: str) -> str:
        """What an event that went wrong is blamed on, where nothing better is known."""
        if self.part == "lock":
            return "lock-path"
        return "split-links" if self.part == "split" else "counts"

    # ---- events ------------------------------------------------------------------------------------------

    def key(self, ids: list[int]) -> tuple[Key, Prefix]:
        whole = len(ids) // self.page_size * self.page_size
        return Key(None, np.asarray(ids, np.int64)), Prefix(None, tuple(ids[:whole]))

    def match(self, ids: list[int]) -> tuple[Any, Prefix]:
        key, prefix = self.key(ids)
        expected = self.model.match(prefix)
        path = [self.model.pages[part] for part in self.model.path(expected)]
        found, right = self.cache.match(key), [page.number for page in path]
        pages = list(found.pages)
        if pages != right:
            promise = "match finds the longest cached prefix, in whole pages."
            seen = f"Of {_tokens(ids, self.page_size)} pages {right} are cached; it found {[int(p) for p in pages]}."
            raise self.broken(self.why_not(pages, right, prefix), promise, seen)
        unlocked = sum(page.users == 0 for page in path)
        if found.unlocked != unlocked:
            promise = "match says how many of its pages nobody has locked."
            seen = f"{unlocked} of {len(right)} are unlocked; it says {found.unlocked}."
            raise self.broken(self.cause("match") if self.locked else "unlocked", promise, seen)
        return found.handle, expected

    def elsewhere(self, ids: list[int]) -> None:
        """The same tokens in another namespace: a cache for two adapters would mix them up."""
        found = [int(page) for page in self.cache.match(Key("another", self.key(ids)[0].ids)).pages]
        if found:
            seen = f"Another namespace's {_tokens(ids, self.page_size)} finds pages {found} of this one."
            raise self.broken("namespace", "Only requests of one namespace share.", seen)

    def why_not(self, pages: list[int], right: list[int], prefix: Prefix) -> str:
        """The cause of a wrong match."""
        if self.part != "match":
            return self.cause("match")
        if pages[: len(right)] == right or pages != right[: len(pages)]:
            return "match-long"
        return "whole-prompt" if not pages and len(right) * self.page_size < len(prefix.ids) else "match-short"

    def insert(self, ids: list[int]) -> None:
        handle, prefix = self.store(None, ids)
        if self.part == "evict":  # used now, by its end too, whatever a cache makes of an offer
            self.cache.lock(handle)
            self.cache.unlock(handle)
            self.model.lock(prefix)
            self.model.lock(prefix, -1)

    def store(self, base: tuple[Any, Prefix] | None, ids: list[int]) -> tuple[Any, Prefix]:
        key, prefix = self.key(ids)
        start = len(base[1].ids) // self.page_size if base else 0
        want = len(prefix.ids) // self.page_size - start
        if want > len(self.free):
            raise Invalid
        mine, self.free = self.free[:want], self.free[want:]
        inserted = self.cache.insert(base[0] if base else None, key, start, np.asarray(mine, np.int32))
        held = self.model.insert(prefix, start, mine)
        if list(inserted.pages) != held:
            promise = "insert answers with the pages that the cache holds from now on."
            seen = f"Offered {mine}; it holds {held} and says {[int(page) for page in inserted.pages]}."
            # Without a base it answered right in the parts before: what the lock left to go on from is wrong.
            raise self.broken("lock-too-much" if base and self.part == "lock" else "frees-before-remap", promise, seen)
        self.free += sorted(set(mine) - set(held))
        return inserted.handle, prefix

    def lock(self, name: int, ids: list[int]) -> None:
        if name in self.held:
            raise Invalid
        handle, prefix = self.match(ids)
        self.gained = sum(self.model.pages[part].users == 0 for part in self.model.path(prefix))
        self.locked = True
        self.cache.lock(handle)
        self.model.lock(prefix)
        self.held[name] = handle, prefix

    def grow(self, name: int, more: list[int]) -> None:
        """What a scheduler does when a prompt was computed: offer it below what is locked, lock that instead."""
        base = self.taken(name)
        longer = self.store(base, [*base[1].ids, *more])
        self.cache.lock(longer[0])
        self.model.lock(longer[1])
        self.cache.unlock(base[0])
        self.model.lock(base[1], -1)
        self.held[name] = longer

    def unlock(self, name: int) -> None:
        handle, prefix = self.taken(name)
        self.cache.unlock(handle)
        self.model.lock(prefix, -1)

    def taken(self, name: int) -> tuple[Any, Prefix]:
        if name not in self.held:
            raise Invalid
        return self.held.pop(name)

    def evict(self, count: int) -> None:
        if count < 1:
            raise Invalid
        before, evictable = dict(self.model.pages), self.model.evictable_pages
        numbers = {page.number: prefix for prefix, page in before.items()}
        gone = [int(page) for page in self.cache.evict(count)]
        for page in gone:
            if page not in numbers or gone.count(page) > 1:
                seen = f"Page {page} is not the cache's, or was given up twice: {gone}."
                raise self.broken("counts", "A page is given up once, by who has it.", seen, page)
            if before[numbers[page]].users:
                seen = f"Page {page} was given up, and {before[numbers[page]].users} still use it."
                raise self.broken("evict-locked", "What is locked is not evicted.", seen, page)
        if len(gone) < min(count, evictable):
            seen = f"{count} pages were wanted, {evictable} could go, {len(gone)} went."
            raise self.broken("evict-few", "evict gives up as many as are wanted, if they can go.", seen)
        rest = {prefix for prefix in before if before[prefix].number not in gone}
        for prefix in rest:
            if any(part not in rest for part in self.model.path(prefix)):
                page = next(p for p in gone if numbers[p] in list(self.model.path(prefix)))
                seen = f"Page {page} went, and page {before[prefix].number}, behind it, stayed."
                raise self.broken("evict-middle", "Prefixes are given up from their ends.", seen, page)
        right = self.model.evict(len(gone))
        if set(gone) != right:
            seen = f"Pages {sorted(gone)} went; the least recently used were {sorted(right)}."
            raise self.broken("evict-order", "The least recently used goes first.", seen)
        self.free += gone

    def counts(self, kind: str) -> None:
        """``held`` and ``evictable`` are what the dictionary says."""
        if self.cache.total_pages != len(self.model.pages):
            said = self.cache.total_pages
            seen = f"After `{kind}` it holds {len(self.model.pages)} pages; `total_pages` is {said}."
            raise self.broken("counts", "`held` counts the cache's pages.", seen)
        right, says = self.model.evictable_pages, self.cache.evictable_pages
        if says != right:
            cause = self.cause(kind)
            if kind == "lock" and says < right:  # pages that had a user before were counted as if they had none
                cause = "lock-too-much" if self.gained else "split-users"
            seen = f"After `{kind}` {right} pages have no user; `evictable` says {says}."
            raise self.broken(cause, "`evictable` counts the pages that nobody uses.", seen)


def _tokens(ids: list[int], page_size: int) -> str:
    pages = [" ".join(map(str, ids[i : i + page_size])) for i in range(0, len(ids), page_size)]
    return f"[{' | '.join(pages)}]"


def show_life(workload: dict[str, Any]) -> str:
    """One line an event; tokens in pages."""
    size = workload["page_size"]
    lines = [f"a new cache, pages of {size} token{'s' * (size > 1)}"]
    for number, (kind, *args) in enumerate(workload["events"], 1):
        said = [_tokens(arg, size) if isinstance(arg, list) else str(arg) for arg in args]
        named = "match in another namespace" if kind == "elsewhere" else kind
        lines.append(f"{number}. {named} {' '.join(said)}")
    return "\n".join(lines)
