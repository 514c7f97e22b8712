"""A conformance kit for prefix caches: compares a cache with a dictionary after every call.

The dictionary maps each cached prefix to its last page. It is slow, because every call searches all entries, and it has
no tree that could be wrong. The kit uses only the interface `minisgl.plugins.cache.base`, so it applies to every cache
plugin.
"""

from __future__ import annotations

import random
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from minisgl.core import I32
from minisgl.plugins.cache.base import Key, MatchResult, PrefixCache

__all__ = ["CacheConformance", "CacheModel", "CachePair", "Prefix"]


class Prefix(NamedTuple):
    """A key of the dictionary: a namespace and the token ids of whole pages."""

    namespace: Hashable
    ids: tuple[int, ...]


@dataclass
class _Page:
    number: int
    users: int  # number of locks
    used: int  # time at which the page was last locked, unlocked or inserted


class CacheModel:
    """The reference cache. ``pages`` maps each cached prefix of whole pages to its last page."""

    def __init__(self, page_size: int):
        self.page_size = page_size
        self.pages: dict[Prefix, _Page] = {}
        self._clock = 0

    def path(self, prefix: Prefix) -> Iterator[Prefix]:
        """Yield the first page of ``prefix``, its first two pages, and so on."""
        for end in range(self.page_size, len(prefix.ids) + 1, self.page_size):
            yield Prefix(prefix.namespace, prefix.ids[:end])

    def match(self, prefix: Prefix) -> Prefix:
        """Return the longest cached prefix of ``prefix``."""
        found = Prefix(prefix.namespace, ())
        for part in self.path(prefix):
            if part not in self.pages:
                break
            found = part
        return found

    def lock(self, prefix: Prefix, users: int = 1) -> None:
        """Add ``users`` locks to every page of ``prefix``. -1 removes one lock."""
        self._clock += 1
        for part in self.path(prefix):
            page = self.pages[part]
            page.users += users
            page.used = self._clock
            assert page.users >= 0, f"page {page.number} was unlocked more often than it was locked"

    def insert(self, prefix: Prefix, start: int, pages: Sequence[int]) -> list[int]:
        """Insert ``pages`` for the pages of ``prefix`` from page ``start`` on.

        Return the pages that are cached for this part of ``prefix`` after the call. Where a page was cached before the
        call, it stays cached, and the page from ``pages`` is not used.
        """
        self._clock += 1
        cached = []
        for part, number in zip(list(self.path(prefix))[start:], pages, strict=True):
            cached.append(self.pages.setdefault(part, _Page(number, 0, self._clock)).number)
        return cached

    def evict(self, count: int) -> set[int]:
        """Evict up to ``count`` unlocked pages, least recently used first, and return them.

        A page is evicted only when it is the last page of every cached prefix that contains it.
        """
        evicted: set[int] = set()
        for _ in range(count):
            inner = {Prefix(p.namespace, p.ids[: -self.page_size]) for p in self.pages}
            ends = [p for p, page in self.pages.items() if page.users == 0 and p not in inner]
            if not ends:
                break
            oldest = min(ends, key=lambda p: self.pages[p].used)
            evicted.add(self.pages.pop(oldest).number)
        return evicted

    @property
    def evictable_pages(self) -> int:
        """Number of pages that are not locked."""
        return sum(page.users == 0 for page in self.pages.values())


class CachePair:
    """A cache and the reference cache. Each method calls both and raises AssertionError if they differ.

    Compared are the matched and inserted pages, the counts, and the evicted pages. With ``lru``, exactly the least
    recently used pages must be evicted. Without ``longest``, a match may be shorter than the longest cached prefix.
    Inserted pages come from a pool of ``num_pages`` pages; evicted pages and
    duplicates return to the pool. A handle of the pair is the tuple (handle of the cache, locked prefix).

    If the cache has the method ``rematch``, the last keys are matched again, from their last result, after
    every change.
    """

    REMATCHED = 6
    """Number of keys that are matched again."""

    def __init__(
        self, cache: PrefixCache, page_size: int, num_pages: int = 1000, lru: bool = True, longest: bool = True
    ):
        self.cache, self.model, self.lru, self.longest = cache, CacheModel(page_size), lru, longest
        self.page_size = page_size
        self.free = list(range(num_pages))
        self._matched: list[tuple[Key, MatchResult]] = []  # the last keys, and their last results

    def key(self, ids: Sequence[int], namespace: Hashable = None) -> Key:
        """Return the cache's key for token ids."""
        return Key(namespace, np.asarray(ids, np.int32))

    def prefix(self, key: Key) -> Prefix:
        """Return the whole pages of a key, as a key of the reference cache."""
        whole = len(key.ids) // self.page_size * self.page_size
        return Prefix(key.namespace, tuple(key.ids[:whole].tolist()))

    def match(self, key: Key) -> tuple[MatchResult, Prefix]:
        """Match a key and compare the matched pages and the number of unlocked pages among them."""
        found = self.cache.match(key)
        expected = self._compare("match", key, found)
        self._matched = [*self._matched[1 - self.REMATCHED :], (key, found)]
        self.check()
        return found, expected

    def _compare(self, method: str, key: Key, found: MatchResult) -> Prefix:
        """Compare what ``method`` found for ``key`` with the reference cache. Return the prefix that was found."""
        expected = self.model.match(self.prefix(key))
        if not self.longest:
            expected = Prefix(expected.namespace, expected.ids[: len(found.pages) * self.page_size])
        path = [self.model.pages[part] for part in self.model.path(expected)]
        pages, unlocked = [page.number for page in path], sum(page.users == 0 for page in path)
        assert found.pages.tolist() == pages, (
            f"{method}: the cache found the pages {found.pages.tolist()}; the longest cached prefix has {pages}"
        )
        assert found.unlocked == unlocked, f"{method}: unlocked is {found.unlocked}, expected {unlocked}"
        return expected

    def lock(self, key: Key) -> tuple[Any, Prefix]:
        """Match a key, lock the matched prefix, and return its handle."""
        found, prefix = self.match(key)
        self.cache.lock(found.handle)
        self.model.lock(prefix)
        self.check()
        return found.handle, prefix

    def unlock(self, locked: tuple[Any, Prefix]) -> None:
        self.cache.unlock(locked[0])
        self.model.lock(locked[1], -1)
        self.check()

    def insert(self, base: tuple[Any, Prefix] | None, key: Key, lock: bool = False) -> tuple[Any, Prefix] | None:
        """Insert free pages for the pages of ``key`` after the locked prefix ``base``.

        With ``lock``, lock the whole prefix ``key`` and return the pair's handle; otherwise return None. Do nothing and
        return None if the pool has too few free pages.
        """
        prefix = self.prefix(key)
        start = len(base[1].ids) // self.page_size if base else 0
        count = len(prefix.ids) // self.page_size - start
        if count > len(self.free):
            return None
        new, self.free = self.free[:count], self.free[count:]
        offered: I32 = np.asarray(new, np.int32)
        inserted = self.cache.insert(base[0] if base else None, key, start, offered)
        cached = self.model.insert(prefix, start, new)
        assert inserted.pages.tolist() == cached, (
            f"insert: the cache returned the pages {inserted.pages.tolist()}, expected {cached}"
        )
        offered[:] = -7  # overwrite the caller's array: the cache must have copied it
        self.free += sorted(set(new) - set(cached))
        if lock:
            self.cache.lock(inserted.handle)
            self.model.lock(prefix)
        self.check()
        return (inserted.handle, prefix) if lock else None

    def evict(self, count: int) -> list[int]:
        """Evict at least ``count`` pages, or all evictable pages, and check and return the evicted pages.

        They must be cached and not locked, and must be at the ends of prefixes. With ``lru``, they must be the least
        recently used.
        """
        evictable = self.model.evictable_pages
        numbers = {page.number: prefix for prefix, page in self.model.pages.items()}
        evicted: list[int] = self.cache.evict(count).tolist()
        assert len(set(evicted)) == len(evicted), f"evict: a page was evicted twice: {evicted}"
        assert len(evicted) >= min(count, evictable), (
            f"evict: the cache evicted {len(evicted)} pages, expected {min(count, evictable)}: {count} were requested, "
            f"and {evictable} are not locked"
        )
        assert set(evicted) <= numbers.keys(), (
            f"evict: pages {sorted(set(evicted) - numbers.keys())} were evicted, but they are not in the cache"
        )
        locked = [page for page in evicted if self.model.pages[numbers[page]].users]
        assert not locked, f"evict: pages {locked} were evicted, but they are locked"
        if self.lru:
            oldest = self.model.evict(len(evicted))
            assert set(evicted) == oldest, (
                f"evict: pages {sorted(evicted)} were evicted; the least recently used pages are {sorted(oldest)}"
            )
        else:
            for page in evicted:
                del self.model.pages[numbers[page]]
            broken = [p for p in self.model.pages if any(part not in self.model.pages for part in self.model.path(p))]
            assert not broken, (
                f"evict: after the eviction of pages {evicted}, a cached prefix lacks a page in its middle: "
                f"{list(broken[0].ids)}"
            )
        self.free += evicted
        self.check()
        return evicted

    def check(self) -> None:
        """Compare the counts of both caches, match the last keys again, and call the cache's own check."""
        assert self.cache.total_pages == len(self.model.pages), (
            f"total_pages is {self.cache.total_pages}, expected {len(self.model.pages)}"
        )
        assert self.cache.evictable_pages == self.model.evictable_pages, (
            f"evictable_pages is {self.cache.evictable_pages}, expected {self.model.evictable_pages}"
        )
        if (rematch := getattr(self.cache, "rematch", None)) is not None:
            self._matched = [(key, rematch(key, last)) for key, last in self._matched]
            for key, found in self._matched:
                self._compare("rematch", key, found)
        self.cache.check()


class CacheConformance:
    """The tests that every prefix cache must pass.

    Subclass it in a test file, give the subclass a name that begins with ``Test``, and implement `make`. For a cache
    that stores no pages (``reuses = False``), the kit only checks that the cache reports zero pages everywhere.
    """

    page_sizes: Sequence[int] = (1, 2, 3)
    """The page sizes to test."""
    lru = True
    """Whether the least recently used pages must be evicted first. False: any order that evicts prefixes at their end
    is allowed."""
    longest = True
    """Whether `match` must find the longest cached prefix. False: it may find fewer of its pages, as a cache that can't
    go on from every page."""
    histories = 150
    """Number of random sequences of calls. Later sequences are longer."""

    def make(self, page_size: int) -> PrefixCache:
        """Build a new, empty object of your cache."""
        raise NotImplementedError("make(self, page_size) must return a new, empty object of the cache to test")

    def pair(self, page_size: int, num_pages: int = 1000) -> CachePair | None:
        """Build the cache together with the reference cache. Return None if the cache stores no pages."""
        cache = self.make(page_size)
        return CachePair(cache, page_size, num_pages, self.lru, self.longest) if cache.reuses else None

    def test_empty_cache(self) -> None:
        """An empty cache has no pages and matches nothing, and only a cache with ``reuses`` stores inserted pages."""
        cache = self.make(2)
        seen = (cache.total_pages, cache.evictable_pages, len(cache.evict(3)))
        assert seen == (0, 0, 0), (
            f"an empty cache has total_pages, evictable_pages and evicted pages {seen}, expected (0, 0, 0)"
        )
        key = Key(None, np.arange(4, dtype=np.int32))
        found = cache.match(key).pages.tolist()
        assert not found, f"match of an empty cache found the pages {found}, expected none"
        inserted = cache.insert(None, key, 0, np.asarray([3, 4], np.int32))
        expected = 2 if cache.reuses else 0
        assert cache.total_pages == len(inserted.pages) == expected, (
            f"after the insertion of 2 pages with reuses={cache.reuses}, total_pages is {cache.total_pages} and insert "
            f"returned {len(inserted.pages)} pages; expected {expected}"
        )

    def test_whole_pages(self) -> None:
        """Match finds the longest cached prefix in whole pages."""
        for size in self.page_sizes:
            if (pair := self.pair(size)) is not None:
                ids = list(range(4 * size))
                pair.insert(None, pair.key(ids))
                for n in range(len(ids) + 1):
                    pair.match(pair.key([*ids[:n], 99, 98, 97]))

    def test_namespaces(self) -> None:
        """Match finds no pages of another namespace."""
        if (pair := self.pair(1)) is not None:
            pair.insert(None, pair.key([1, 2, 3], "adapter"))
            pair.match(pair.key([1, 2, 3]))
            pair.match(pair.key([1, 2, 3], "adapter"))

    def test_duplicate_pages(self) -> None:
        """A prefix that two requests computed is stored once, with the pages of the first."""
        if (pair := self.pair(1)) is not None:
            pair.insert(None, pair.key([1, 2, 3]))
            pair.insert(None, pair.key([1, 2, 4, 5]))
            pair.match(pair.key([1, 2, 4, 5]))

    def test_locked_pages(self) -> None:
        """Locked pages are not evicted, and all other pages can be evicted."""
        if (pair := self.pair(1)) is not None:
            pair.insert(None, pair.key([1, 2, 3, 4]))
            pair.insert(None, pair.key([1, 2, 7]))
            first, second = pair.lock(pair.key([1, 2, 3])), pair.lock(pair.key([1, 9]))
            pair.evict(9)
            pair.unlock(first)
            pair.evict(9)
            pair.unlock(second)
            pair.evict(9)

    def test_random_histories(self) -> None:
        """Random sequences of calls give the same results as the reference cache."""
        for seed in range(self.histories):
            rng = random.Random(seed)
            pair = self.pair(rng.choice(self.page_sizes), rng.randint(1, 30))
            if pair is not None:
                _run_history(pair, rng, 2 + seed // 4)


def _run_history(pair: CachePair, rng: random.Random, events: int) -> None:
    """Call a cache ``events`` times as requests do: match, lock, insert after a locked prefix, unlock, evict.

    Then unlock everything and evict all pages.
    """
    locked: list[tuple[Any, Prefix]] = []

    def ids(max_tokens: int = 14) -> list[int]:
        return [rng.randint(0, 1) for _ in range(rng.randint(0, max_tokens))]

    for _ in range(events):
        key = pair.key(ids(), rng.choice([None, None, None, "adapter"]))
        event = rng.choice(["match", "lock", "insert", "grow", "unlock", "evict"])
        if event == "match":
            pair.match(key)
        elif event == "lock":
            locked.append(pair.lock(key))
        elif event == "insert":
            pair.insert(None, key)
        elif event == "evict":
            pair.evict(rng.randint(1, 8))
        elif locked:
            base = locked.pop(rng.randrange(len(locked)))
            longer = None
            if event == "grow":
                longer = pair.insert(base, pair.key([*base[1].ids, *ids(6)], base[1].namespace), lock=True)
                locked.append(longer or base)
            if event == "unlock" or longer is not None:
                pair.unlock(base)
    for each in locked:
        pair.unlock(each)
    pair.evict(len(pair.model.pages))
    assert pair.cache.total_pages == 0, (
        f"no prefix is locked, but {pair.cache.total_pages} pages were not evicted; expected that all pages are evicted"
    )
