"""What a prefix cache is asked for. Caches are plugins; they know page numbers, never the pool of KV memory.

A cache frees nothing: ``evict`` returns pages, and the scheduler's ledger gives them back.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple, Protocol

from minisgl.core import I32, I64

__all__ = ["InsertResult", "Key", "MatchResult", "PrefixCache"]


class Key(NamedTuple):
    """What a prefix is known by. Two requests share KV only where namespace and ids are equal."""

    namespace: Hashable  # None today; a LoRA adapter, a salt, an image model
    ids: I64  # token ids


class MatchResult(NamedTuple):
    """The longest prefix that a cache holds, in whole pages."""

    handle: Any
    pages: I32
    unlocked: int  # how many of the pages nobody has locked: locking them takes them from ``evictable``


class InsertResult(NamedTuple):
    """``pages[i]`` is the cache's page for page i of the key, for as many as it holds. It took over those that equal
    the caller's; for the others it had one already, and the caller's is a duplicate."""

    handle: Any
    pages: I32


class PrefixCache(Protocol):
    """Maps token prefixes to pages. Every length is a multiple of the page size."""

    reuses: bool
    """False: it never holds anything, so that waiting for another request's prefix gains nothing."""

    def match(self, key: Key) -> MatchResult:
        """The longest cached prefix of key, in whole pages. No side effect; good until the cache next changes."""

    def lock(self, handle: Any) -> None:
        """Keep the handle's prefix from eviction until `unlock`. Locks are counted."""

    def unlock(self, handle: Any) -> None:
        """The inverse of `lock`."""

    def insert(self, base: Any, key: Key, start: int, pages: I32) -> InsertResult:
        """Offer ``pages``, the KV of ``key`` from page ``start`` on; ``base`` is the handle of the first ``start``
        pages, locked by the caller (None: the root). Walks from there: O(new pages). ``Inserted.pages`` is for
        page ``start`` on, and ``Inserted.handle`` for the whole prefix; it is not locked yet."""

    def evict(self, pages: int) -> I32:
        """Give up at least so many pages if it can; it may return fewer, or somewhat more. Never locked ones."""

    @property
    def evictable_pages(self) -> int:
        """Pages that `evict` could return now."""

    @property
    def total_pages(self) -> int:
        """Pages that the cache owns, locked or not."""

    def check(self) -> None:
        """Raise AssertionError where the cache's own structure is broken."""
