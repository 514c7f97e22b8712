"""A prefix cache: a table from the hash of a prefix to the page that ends the prefix. There is no tree.

The hash of a page covers all tokens up to the end of the page: it is made from the hash of the page before.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, NewType

import numpy as np

from minisgl.core import I32
from minisgl.hooks import hookimpl
from minisgl.plugins.cache.base import InsertResult, Key, MatchResult

Hash = NewType("Hash", bytes)


@dataclass
class Blocks:
    """A table of hashed pages, of which the least recently used one is evicted first."""

    def build(self, page_size: int) -> BlockCache:
        return BlockCache(page_size)


@dataclass
class Block:
    """A page with the KV of the tokens that end a prefix. ``parent`` is the hash of the page before."""

    page: int
    parent: Hash
    users: int = 0
    children: int = 0
    stamp: int = 0


class BlockCache:
    """Pages by the hash of their prefix. Implements `minisgl.plugins.cache.base.PrefixCache`.

    A handle is a list of hashes.
    """

    reuses = True

    def __init__(self, page_size: int):
        self.page_size = page_size
        self.blocks: dict[Hash, Block] = {}
        self.evictable_pages = 0
        self._clock = 0

    @property
    def total_pages(self) -> int:
        """Number of pages in the table."""
        return len(self.blocks)

    # ---- hashes --------------------------------------------------------------------------------------

    def _root(self, namespace: Hashable) -> Hash:
        """Return the hash of the empty prefix of a namespace."""
        return Hash(hashlib.sha256(repr(namespace).encode()).digest())

    def _next(self, parent: Hash, ids: I32) -> Hash:
        """Return the hash of a prefix that is one page longer than ``parent``: ``ids`` are the page's tokens."""
        return Hash(hashlib.sha256(parent + ids.tobytes()).digest())

    def _hashes(self, key: Key) -> list[Hash]:
        """Return the hash of each whole page of ``key``."""
        hashes, last = [], self._root(key.namespace)
        for end in range(self.page_size, len(key.ids) + 1, self.page_size):
            last = self._next(last, key.ids[end - self.page_size : end])
            hashes.append(last)
        return hashes

    # ---- PrefixCache ---------------------------------------------------------------------------------

    def match(self, key: Key) -> MatchResult:
        """Return the longest cached prefix of ``key``, in whole pages."""
        found: list[Hash] = []
        for each in self._hashes(key):
            if each not in self.blocks:
                break
            found.append(each)
        blocks = [self.blocks[each] for each in found]
        pages = np.array([block.page for block in blocks], np.int32)
        return MatchResult(found, pages, sum(block.users == 0 for block in blocks))

    def lock(self, handle: list[Hash]) -> None:
        """Count a user on every page of a prefix."""
        self._clock += 1
        for each in handle:
            block = self.blocks[each]
            self.evictable_pages -= block.users == 0
            block.users += 1
            block.stamp = self._clock

    def unlock(self, handle: list[Hash] | None) -> None:
        """Remove a user from every page of a prefix."""
        self._clock += 1
        for each in handle or ():
            block = self.blocks[each]
            block.users -= 1
            self.evictable_pages += block.users == 0
            block.stamp = self._clock

    def insert(self, base: list[Hash] | None, key: Key, start: int, pages: I32) -> InsertResult:
        """Insert the pages of ``key`` from page ``start`` on. A page that is there already is kept."""
        self._clock += 1
        hashes = self._hashes(key)[: start + len(pages)]
        parents = [self._root(key.namespace), *hashes]
        for i, page in enumerate(pages.tolist(), start):
            if hashes[i] not in self.blocks:
                self.blocks[hashes[i]] = Block(page, parents[i], stamp=self._clock)
                self.evictable_pages += 1
                if parents[i] in self.blocks:
                    self.blocks[parents[i]].children += 1
        cached = [self.blocks[each].page for each in hashes[start:]]
        return InsertResult(hashes, np.array(cached, np.int32))

    def evict(self, pages: int) -> I32:
        """Evict ``pages`` pages without users, and return them. The end of a prefix goes before its beginning."""
        heap = [(block.stamp, each) for each, block in self.blocks.items() if not block.users and not block.children]
        heapq.heapify(heap)
        evicted: list[int] = []
        while len(evicted) < pages and heap:
            block = self.blocks.pop(heapq.heappop(heap)[1])
            evicted.append(block.page)
            self.evictable_pages -= 1
            parent = self.blocks.get(block.parent)
            if parent is not None:
                parent.children -= 1
                if not parent.users and not parent.children:
                    heapq.heappush(heap, (parent.stamp, block.parent))
        return np.array(evicted, np.int32)

    def check(self) -> None:
        """Raise AssertionError if a page is in the table twice."""
        pages = [block.page for block in self.blocks.values()]
        assert len(set(pages)) == len(pages), "a page is in the table twice"


@hookimpl
def minisgl_configs() -> Any:
    yield "cache", "museum", Blocks
