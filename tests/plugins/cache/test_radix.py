"""The radix cache, compared with a dictionary: match, lock, split, insert and evict in random order."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from minisgl.plugins.cache.base import Key, MatchResult
from minisgl.plugins.cache.radix import Handle, Node, RadixCache
from minisgl.testing.cache import CachePair

TOKENS = st.lists(st.integers(0, 1), max_size=14)
NAMESPACES = st.sampled_from([None, None, None, "adapter"])


class Radix(RuleBasedStateMachine):
    """Random sequences of match, lock, insert, unlock and evict, on the radix cache and on a dictionary."""

    @initialize(page_size=st.sampled_from([1, 2, 3]), num_pages=st.integers(1, 30))
    def start(self, page_size: int, num_pages: int) -> None:
        self.pair = CachePair(RadixCache(page_size), page_size, num_pages)
        self.locked: list[tuple[Any, Any]] = []

    @rule(ids=TOKENS, namespace=NAMESPACES)
    def match(self, ids: list[int], namespace: str | None) -> None:
        self.pair.match(self.pair.key(ids, namespace))

    @rule(ids=TOKENS, namespace=NAMESPACES)
    def lock(self, ids: list[int], namespace: str | None) -> None:
        self.locked.append(self.pair.lock(self.pair.key(ids, namespace)))

    @rule(ids=TOKENS, namespace=NAMESPACES)
    def insert_at_the_root(self, ids: list[int], namespace: str | None) -> None:
        self.pair.insert(None, self.pair.key(ids, namespace))

    @precondition(lambda self: self.locked)
    @rule(data=st.data(), more=TOKENS)
    def insert_below_a_lock_and_move_it(self, data: st.DataObject, more: list[int]) -> None:
        """Do what the scheduler does for a chunk: insert it, lock the longer prefix, unlock the shorter one."""
        base = self.locked.pop(data.draw(st.integers(0, len(self.locked) - 1)))
        key = self.pair.key([*base[1].ids, *more], base[1].namespace)
        longer = self.pair.insert(base, key, lock=True)
        if longer is not None:
            self.locked.append(longer)
            self.pair.unlock(base)
        else:
            self.locked.append(base)

    @precondition(lambda self: self.locked)
    @rule(data=st.data())
    def unlock(self, data: st.DataObject) -> None:
        self.pair.unlock(self.locked.pop(data.draw(st.integers(0, len(self.locked) - 1))))

    @rule(count=st.integers(1, 8))
    def evict(self, count: int) -> None:
        self.pair.evict(count)

    def teardown(self) -> None:
        if not hasattr(self, "pair"):
            return
        for locked in self.locked:
            self.pair.unlock(locked)
        assert self.pair.cache.evictable_pages == self.pair.cache.total_pages
        self.pair.evict(self.pair.cache.total_pages)
        assert self.pair.cache.total_pages == 0


TestRadix = Radix.TestCase
TestRadix.settings = settings(
    max_examples=120, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


def key(*ids: int) -> Key:
    return Key(None, np.asarray(ids, np.int32))


def pages(*numbers: int) -> np.ndarray:
    return np.asarray(numbers, np.int32)


def sample() -> RadixCache:
    """Return a cache of the prefixes 0 1 2 3 4 5, 0 1 2 3 6 7 (locked) and 8 9, with pages of two tokens."""
    cache = RadixCache(2)
    cache.insert(None, key(0, 1, 2, 3, 4, 5), 0, pages(10, 11, 12))
    cache.insert(None, key(0, 1, 2, 3, 6, 7), 0, pages(20, 21, 13))
    cache.insert(None, key(8, 9), 0, pages(14))
    cache.lock(cache.match(key(0, 1, 2, 3, 6, 7)).handle)
    cache.check()
    return cache


def test_split_keeps_users_on_both_parts() -> None:
    cache = sample()
    assert (cache.total_pages, cache.evictable_pages) == (5, 2)
    locked = cache.match(key(0, 1, 9, 9))
    assert (locked.pages.tolist(), locked.unlocked) == ([10], 0)
    cache.lock(locked.handle)
    cache.check()
    assert sorted(cache.evict(9).tolist()) == [12, 14]
    cache.unlock(locked.handle)
    assert cache.evict(9).tolist() == []


def test_match_does_not_change_eviction_order() -> None:
    for do_match in (False, True):
        cache = RadixCache(1)
        for i in range(4):
            cache.insert(None, key(i), 0, pages(i))
        if do_match:
            assert cache.match(key(0)).pages.tolist() == [0]
        assert cache.evict(1).tolist() == [0]


def test_lru_eviction_counts_locks_as_use() -> None:
    cache = RadixCache(1)
    for i in range(4):
        cache.insert(None, key(i), 0, pages(i))
    used = cache.match(key(0)).handle
    cache.lock(used)
    cache.unlock(used)
    assert [cache.evict(1).tolist() for _ in range(4)] == [[1], [2], [3], [0]]


def test_insert_copies_arrays() -> None:
    cache = RadixCache(1)
    ids, numbers = np.asarray([1, 2], np.int32), pages(5, 6)
    cache.insert(None, Key(None, ids), 0, numbers)
    ids[:], numbers[:] = 9, 9
    cache.check()
    assert cache.match(key(1, 2)).pages.tolist() == [5, 6]


def test_namespace_without_pages_needs_no_memory() -> None:
    """However a namespace becomes empty, the cache forgets it; a prefix locked meanwhile stays usable."""
    cache = RadixCache(1)
    for i in range(100):
        mine = Key(f"salt {i}", np.asarray([1, 2], np.int32))
        assert len(cache.match(mine).pages) == 0
        first, second = cache.match(mine).handle, cache.match(mine).handle
        cache.lock(first)
        cache.lock(second)
        assert not cache.roots
        assert cache.insert(first, mine, 0, pages(1, 2)).pages.tolist() == [1, 2]
        assert cache.insert(second, mine, 0, pages(3, 4)).pages.tolist() == [1, 2]
        assert list(cache.roots) == [mine.namespace]
        cache.check()
        assert sorted(cache.evict(2).tolist()) == [1, 2]
        assert not cache.roots
        cache.insert(first, mine, 0, pages(5, 6))
        assert cache.match(mine).pages.tolist() == [5, 6]
        cache.unlock(first)
        cache.unlock(second)
        cache.check()
        assert cache.evict(9).tolist() in ([5, 6], [6, 5])
        assert not cache.roots and cache.total_pages == cache.evictable_pages == 0


def test_rematch_after_a_split_an_eviction_and_an_insertion() -> None:
    """A result from before a change leads to the result that a new match has."""
    cache = RadixCache(1)
    cache.insert(None, key(1, 2, 3, 4), 0, pages(1, 2, 3, 4))
    mine = key(1, 2, 3, 9)
    last = cache.match(mine)

    def again() -> tuple[list[int], int]:
        found, new = cache.rematch(mine, last), cache.match(mine)
        assert (found.pages.tolist(), found.unlocked) == (new.pages.tolist(), new.unlocked)
        return found.pages.tolist(), found.unlocked

    assert again() == ([1, 2, 3], 3)
    locked = cache.match(key(1)).handle
    cache.lock(locked)  # splits the edge before the end of the match
    assert again() == ([1, 2, 3], 2)
    cache.evict(2)
    assert again() == ([1, 2], 1)
    cache.insert(None, key(1, 2, 3, 9), 0, pages(11, 12, 13, 14))
    assert again() == ([1, 2, 13, 14], 3)
    cache.unlock(locked)
    cache.evict(9)
    assert again() == ([], 0)
    cache.insert(None, key(1, 2, 3, 9), 0, pages(21, 22, 23, 24))
    assert again() == ([21, 22, 23, 24], 4)


def _duplicate_page(cache: RadixCache) -> None:
    leaf = next(n for n in cache.nodes() if n.is_leaf)
    leaf.pages = pages(10)


def _swap_children(cache: RadixCache) -> None:
    children = cache.roots[None].children
    first, second = list(children)
    children[first], children[second] = children[second], children[first]


def _change_parent(cache: RadixCache) -> None:
    root = cache.roots[None]
    next(n for n in cache.nodes() if n.is_leaf and n.parent is not root).parent = root


def _remove_leaf(cache: RadixCache) -> None:
    cache.roots[None].children.popitem()


def _clear_users(cache: RadixCache) -> None:
    top = next(n for n in cache.nodes() if not n.is_leaf)
    top.users = 0
    cache.evictable_pages += len(top.pages)


def _shorten_edge(cache: RadixCache) -> None:
    node = next(n for n in cache.nodes() if len(n.pages) > 1)
    node.ids = node.ids[:-1]


def _change(name: str, by: int) -> Callable[[RadixCache], None]:
    return lambda cache: setattr(cache, name, getattr(cache, name) + by)


CORRUPTIONS: dict[str, Callable[[RadixCache], None]] = {
    "total_pages is too high": _change("total_pages", 1),
    "evictable_pages is too low": _change("evictable_pages", -1),
    "a page is in two nodes": _duplicate_page,
    "children are swapped": _swap_children,
    "a parent is wrong": _change_parent,
    "a leaf is removed": _remove_leaf,
    "a node without users has a child with users": _clear_users,
    "an edge is not whole pages": _shorten_edge,
    "a leaf is not in the queue": lambda cache: cache._leaves.replace([]),
}


@pytest.mark.parametrize("what", CORRUPTIONS)
def test_check_finds_corruption(what: str) -> None:
    cache = sample()
    CORRUPTIONS[what](cache)
    with pytest.raises(AssertionError):
        cache.check()


def _exercise(cache: RadixCache) -> None:
    """Use shared prefixes, splits of locked edges, an eviction while a prefix is locked, and one after the unlock."""
    pair = CachePair(cache, 2)
    pair.insert(None, pair.key([0, 1, 2, 3, 4, 5]))
    longer = pair.lock(pair.key([0, 1, 2, 3, 4, 5]))
    shorter = pair.lock(pair.key([0, 1, 2, 9]))
    pair.insert(shorter, pair.key([0, 1, 7, 7]))
    again = pair.lock(pair.key([0, 1, 7, 7]))
    pair.insert(None, pair.key([8, 8]))
    pair.unlock(shorter)
    pair.evict(3)
    pair.unlock(again)
    pair.unlock(longer)
    pair.insert(None, pair.key([8, 8]))
    pair.match(pair.key([0, 1, 2, 3, 4, 5]))
    pair.evict(2)
    pair.evict(9)


def _split_without_users(self: RadixCache, node: Node, at: int) -> Node:
    upper = _SPLIT(self, node, at)
    upper.users = 0
    return upper


def _lock_only_the_leaf(self: RadixCache, handle: Handle) -> None:
    _LOCK(self, handle)
    if handle.node.parent is not None and handle.node.parent.parent is not None:
        handle.node.parent.users -= 1


def _evict_locked(self: RadixCache, count: int) -> np.ndarray:
    evicted = _EVICT(self, count)
    leaf = next((n for n in self.nodes() if n.is_leaf), None)
    if len(evicted) >= count or leaf is None or leaf.parent is None:
        return evicted
    leaf.parent.children = {page: n for page, n in leaf.parent.children.items() if n is not leaf}
    self.total_pages -= len(leaf.pages)
    return np.concatenate((evicted, leaf.pages))


def _match_counts_as_use(self: RadixCache, key: Key) -> MatchResult:
    found = _MATCH(self, key)
    self.lock(found.handle)
    self.unlock(found.handle)
    return found


def _rematch_trusts_the_last_result(self: RadixCache, key: Key, last: MatchResult) -> MatchResult:
    return last


def _match_whole_edge(self: RadixCache, a: np.ndarray, b: np.ndarray) -> int:
    return len(a) // self.page_size


_SPLIT, _LOCK, _MATCH, _EVICT = RadixCache._split, RadixCache.lock, RadixCache.match, RadixCache.evict
WRONG: dict[str, tuple[str, Callable[..., Any]]] = {
    "a split loses users": ("_split", _split_without_users),
    "a lock skips nodes of the path": ("lock", _lock_only_the_leaf),
    "a locked leaf is evicted": ("evict", _evict_locked),
    "a match counts as use": ("match", _match_counts_as_use),
    "a rematch returns the last result": ("rematch", _rematch_trusts_the_last_result),
    "a match takes the whole edge": ("_common", _match_whole_edge),
}


@pytest.mark.parametrize("what", WRONG)
def test_dictionary_finds_wrong_cache(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _exercise(RadixCache(2))
    monkeypatch.setattr(RadixCache, *WRONG[what])
    with pytest.raises(AssertionError):
        _exercise(RadixCache(2))


def _seconds_an_eviction(leaves: int) -> float:
    """Return the median CPU time in seconds of five evictions and an insertion in a cache with ``leaves`` leaves."""
    cache = RadixCache(1)
    for i in range(leaves):
        cache.insert(None, key(i % 100, i), 0, pages(2 * i, 2 * i + 1))
    times = []
    for i in range(400):
        begin = time.thread_time()
        for _ in range(5):
            cache.evict(1)
        cache.insert(None, key(i % 100, leaves + i), 0, pages(2 * (leaves + i), 2 * (leaves + i) + 1))
        times.append(time.thread_time() - begin)
    cache.check()
    return statistics.median(times)


def test_cost_of_eviction() -> None:
    """Eviction from a cache 32 times as large takes less than 5 times as long."""
    small, large = _seconds_an_eviction(1_000), _seconds_an_eviction(32_000)
    assert large < 5 * small, f"{small * 1e6:.0f} µs with 1,000 leaves, {large * 1e6:.0f} µs with 32,000"


def test_queue_does_not_grow_with_use() -> None:
    cache = RadixCache(1)
    for i in range(10):
        cache.insert(None, key(i), 0, pages(i))
    for i in range(5_000):
        handle = cache.match(key(i % 10)).handle
        cache.lock(handle)
        cache.unlock(handle)
    assert len(cache._leaves) < 200
