"""A prefix cache against a dictionary: the plainest cache there is, and a pair that makes any cache agree with it.

The model remembers, page by page, the whole prefix that each page completes; so it splits nothing, and looks at
everything to answer anything. Knows `minisgl.kvcache` and no cache plugin: whoever writes one can test it with this.
"""

from __future__ import annotations

import random
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from minisgl.core import I32
from minisgl.kvcache import Key, MatchResult, PrefixCache

__all__ = ["CacheConformance", "CacheModel", "CachePair", "Prefix"]


class Prefix(NamedTuple):
    """A prefix in whole pages, as the model knows it."""

    namespace: Hashable
    ids: tuple[int, ...]


@dataclass
class _Page:
    number: int
    users: int
    used: int  # when it was last locked, unlocked or inserted


class CacheModel:
    """``pages`` maps each cached prefix of whole pages to its last page."""

    def __init__(self, page_size: int):
        self.page_size = page_size
        self.pages: dict[Prefix, _Page] = {}
        self._clock = 0

    def path(self, prefix: Prefix) -> Iterator[Prefix]:
        """``prefix`` cut after one page, two pages, …"""
        for end in range(self.page_size, len(prefix.ids) + 1, self.page_size):
            yield Prefix(prefix.namespace, prefix.ids[:end])

    def match(self, prefix: Prefix) -> Prefix:
        """The longest cached prefix of ``prefix``."""
        found = Prefix(prefix.namespace, ())
        for part in self.path(prefix):
            if part not in self.pages:
                break
            found = part
        return found

    def lock(self, prefix: Prefix, users: int = 1) -> None:
        """``users`` more (-1: one fewer) on every page of the path."""
        self._clock += 1
        for part in self.path(prefix):
            page = self.pages[part]
            page.users += users
            page.used = self._clock
            assert page.users >= 0

    def insert(self, prefix: Prefix, start: int, pages: Sequence[int]) -> list[int]:
        """The pages that the cache then has from page ``start`` on."""
        self._clock += 1
        held = []
        for part, number in zip(list(self.path(prefix))[start:], pages, strict=True):
            held.append(self.pages.setdefault(part, _Page(number, 0, self._clock)).number)
        return held

    def evict(self, count: int) -> set[int]:
        """The pages to go, least recently used first, each the end of every path through it."""
        gone: set[int] = set()
        for _ in range(count):
            inner = {Prefix(p.namespace, p.ids[: -self.page_size]) for p in self.pages}
            ends = [p for p, page in self.pages.items() if page.users == 0 and p not in inner]
            if not ends:
                break
            oldest = min(ends, key=lambda p: self.pages[p].used)
            gone.add(self.pages.pop(oldest).number)
        return gone

    @property
    def evictable_pages(self) -> int:
        return sum(page.users == 0 for page in self.pages.values())


class CachePair:
    """Does everything to a cache and to its model, and compares: pages, counts, and with ``lru`` who is evicted.

    Page numbers are drawn from a pool of ``num_pages``, as a ledger would: what is evicted or was a duplicate is
    used again. A handle of the pair is (the cache's, the model's).
    """

    def __init__(self, cache: PrefixCache, page_size: int, num_pages: int = 1000, lru: bool = True):
        self.cache, self.model, self.lru = cache, CacheModel(page_size), lru
        self.page_size = page_size
        self.free = list(range(num_pages))

    def key(self, ids: Sequence[int], namespace: Hashable = None) -> Key:
        return Key(namespace, np.asarray(ids, np.int64))

    def prefix(self, key: Key) -> Prefix:
        whole = len(key.ids) // self.page_size * self.page_size
        return Prefix(key.namespace, tuple(key.ids[:whole].tolist()))

    def match(self, key: Key) -> tuple[MatchResult, Prefix]:
        """Match, and compare what was found and what is still unlocked of it."""
        expected = self.model.match(self.prefix(key))
        found = self.cache.match(key)
        path = [self.model.pages[part] for part in self.model.path(expected)]
        assert found.pages.tolist() == [page.number for page in path], "match: not the longest cached prefix"
        assert found.unlocked == sum(page.users == 0 for page in path), "match: wrong count of unlocked pages"
        self.check()
        return found, expected

    def lock(self, key: Key) -> tuple[Any, Prefix]:
        """Match and lock."""
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
        """Offer fresh pages for what ``key`` has beyond ``base``; with ``lock``, the new handle, locked. Does nothing
        where the pool has no such pages."""
        prefix = self.prefix(key)
        start = len(base[1].ids) // self.page_size if base else 0
        want = len(prefix.ids) // self.page_size - start
        if want > len(self.free):
            return None
        mine, self.free = self.free[:want], self.free[want:]
        offered: I32 = np.asarray(mine, np.int32)
        inserted = self.cache.insert(base[0] if base else None, key, start, offered)
        held = self.model.insert(prefix, start, mine)
        assert inserted.pages.tolist() == held, f"insert: the cache says {inserted.pages.tolist()}, it holds {held}"
        offered[:] = -7  # the caller's array is the caller's
        self.free += sorted(set(mine) - set(held))
        if lock:
            self.cache.lock(inserted.handle)
            self.model.lock(prefix)
        self.check()
        return (inserted.handle, prefix) if lock else None

    def evict(self, count: int) -> list[int]:
        """Evict, and compare: enough, none of them locked, paths from their ends, and with ``lru`` the oldest."""
        evictable = self.model.evictable_pages
        numbers = {page.number: prefix for prefix, page in self.model.pages.items()}
        gone = self.cache.evict(count).tolist()
        assert len(set(gone)) == len(gone), f"evict: a page was given up twice: {gone}"
        assert len(gone) >= min(count, evictable), f"evict: {len(gone)} of {count} pages, {evictable} could go"
        assert set(gone) <= numbers.keys(), f"evict: pages {set(gone) - numbers.keys()} are not the cache's"
        locked = [page for page in gone if self.model.pages[numbers[page]].users]
        assert not locked, f"evict: pages {locked} are locked"
        if self.lru:
            assert set(gone) == self.model.evict(len(gone)), "evict: not the least recently used"
        else:
            for page in gone:
                del self.model.pages[numbers[page]]
            broken = [p for p in self.model.pages if any(part not in self.model.pages for part in self.model.path(p))]
            assert not broken, "evict: a page is gone from the middle of a prefix"
        self.free += gone
        self.check()
        return gone

    def check(self) -> None:
        """The counts agree, and the cache finds nothing wrong with itself."""
        assert self.cache.total_pages == len(self.model.pages), (
            f"held: {self.cache.total_pages}, not {len(self.model.pages)}"
        )
        assert self.cache.evictable_pages == self.model.evictable_pages, (
            f"evictable: {self.cache.evictable_pages}, not {self.model.evictable_pages}"
        )
        self.cache.check()


class CacheConformance:
    """What every prefix cache must do. Subclass it in a test file, name it ``Test…`` and say how to make yours. A cache
    that holds nothing (``reuses = False``) is only asked whether it says so everywhere."""

    page_sizes: Sequence[int] = (1, 2, 3)
    lru = True
    """Whether the least recently used pages must go first; without, any order that keeps prefixes whole."""
    lives = 150
    """Random lives, of growing length."""

    def make(self, page_size: int) -> PrefixCache:
        """Your cache, empty."""
        raise NotImplementedError

    def pair(self, page_size: int, num_pages: int = 1000) -> CachePair | None:
        """The cache beside its model; None for one that holds nothing."""
        cache = self.make(page_size)
        return CachePair(cache, page_size, num_pages, self.lru) if cache.reuses else None

    def test_a_cache_that_holds_nothing_says_so(self) -> None:
        cache = self.make(2)
        assert (cache.total_pages, cache.evictable_pages, len(cache.evict(3))) == (0, 0, 0), (
            "an empty cache holds something"
        )
        key = Key(None, np.arange(4))
        assert len(cache.match(key).pages) == 0, "an empty cache finds a prefix"
        inserted = cache.insert(None, key, 0, np.asarray([3, 4], np.int32))
        assert cache.total_pages == len(inserted.pages) == (2 if cache.reuses else 0), "`reuses` is not what it does"

    def test_a_prefix_is_found_in_whole_pages(self) -> None:
        for size in self.page_sizes:
            if (pair := self.pair(size)) is not None:
                ids = list(range(4 * size))
                pair.insert(None, pair.key(ids))
                for n in range(len(ids) + 1):
                    pair.match(pair.key([*ids[:n], 99, 98, 97]))

    def test_namespaces_share_nothing(self) -> None:
        if (pair := self.pair(1)) is not None:
            pair.insert(None, pair.key([1, 2, 3], "adapter"))
            pair.match(pair.key([1, 2, 3]))
            pair.match(pair.key([1, 2, 3], "adapter"))

    def test_what_two_computed_is_kept_once(self) -> None:
        if (pair := self.pair(1)) is not None:
            pair.insert(None, pair.key([1, 2, 3]))
            pair.insert(None, pair.key([1, 2, 4, 5]))
            pair.match(pair.key([1, 2, 4, 5]))

    def test_locked_pages_stay_and_the_rest_can_be_had(self) -> None:
        if (pair := self.pair(1)) is not None:
            pair.insert(None, pair.key([1, 2, 3, 4]))
            pair.insert(None, pair.key([1, 2, 7]))
            first, second = pair.lock(pair.key([1, 2, 3])), pair.lock(pair.key([1, 9]))
            pair.evict(9)
            pair.unlock(first)
            pair.evict(9)
            pair.unlock(second)
            pair.evict(9)

    def test_any_life_gives_the_same_answers_as_a_dictionary(self) -> None:
        for seed in range(self.lives):
            rng = random.Random(seed)
            pair = self.pair(rng.choice(self.page_sizes), rng.randint(1, 30))
            if pair is not None:
                _live(pair, rng, 2 + seed // 4)


def _live(pair: CachePair, rng: random.Random, events: int) -> None:
    """Requests that match, lock, insert below what they locked, leave, and a pool that runs out; at last all leave."""
    locked: list[tuple[Any, Prefix]] = []

    def ids(most: int = 14) -> list[int]:
        return [rng.randint(0, 1) for _ in range(rng.randint(0, most))]

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
    assert pair.cache.total_pages == 0, f"nobody uses anything, and {pair.cache.total_pages} pages can't be evicted"
