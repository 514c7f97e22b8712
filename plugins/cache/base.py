"""The interface of a prefix cache, which maps token prefixes to KV pages. Caches are plugins (group `cache`).

The radix tree is `plugins/cache/radix.py` (match, insert, node split, evict). `plugins/cache/prefix.py` calls a cache.

A prefix cache knows page numbers only. It never reads or writes KV memory, and it frees no page: `PrefixCache.evict`
returns page numbers, and the scheduler's `PrefixCacheManager` frees these pages in the page allocator.

What a cache is told of a request: `PrefixCache.match` comes first, with a key that lacks the last token, since this
token must be computed. `PrefixCache.insert` comes after each chunk of the prompt, and once more, with the whole pages
of prompt and answer, when the request ends or is retracted. So a prompt of n whole pages is inserted with n pages, and
matched with at most n - 1. A match shorter than the longest is safe, but costs computing. The options of a cache get
the page size: ``def build(self, page_size)``.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple, Protocol

from minisgl.core import I32
from minisgl.scheduler.cache_manager import MatchResult

__all__ = ["InsertResult", "Key", "MatchResult", "PrefixCache"]


class Key(NamedTuple):
    """The key of a prefix. Two requests share KV only if their namespaces and their token ids are equal."""

    namespace: Hashable  # the request's ``cache_salt``, or None; a LoRA adapter would go here too
    ids: I32  # token ids, [tokens]; shared with the request: a cache that keeps them must copy them


class InsertResult(NamedTuple):
    """The result of `PrefixCache.insert`. ``pages[i]`` is the cache's page for offered page i.

    If ``pages[i]`` equals the offered page, the cache now owns that page. Otherwise the cache already had a page with
    the same KV, and the offered page is a duplicate, which the caller keeps. ``pages`` is shorter than the offer if the
    cache did not store all of it.
    """

    handle: Any  # the whole prefix, from its first page to the last of ``pages``; not locked
    pages: I32  # [pages]


class PrefixCache(Protocol):
    """A map from token prefixes to KV pages. The length of every prefix is a multiple of the page size.

    A cache may have two further members. ``make_manager(spec, cache, events)`` returns the `CacheManager` that knows
    this cache, if that is another than usual. ``rematch(key, last)`` returns what ``match(key)`` returns, in less time:
    ``last`` is the result for the same key before the last changes of the cache.
    """

    reuses: bool
    """Whether the cache ever holds pages. If True, a request waits while another one computes its next page."""

    def match(self, key: Key) -> MatchResult:
        """Return the longest cached prefix of ``key``. No side effect. The result is valid until the cache changes."""

    def lock(self, handle: Any) -> None:
        """Keep the handle's prefix from eviction until `unlock`. Locks are counted. The prefix may be empty."""

    def unlock(self, handle: Any) -> None:
        """Remove one lock from the handle's prefix."""

    def insert(self, base: Any, key: Key, start: int, pages: I32) -> InsertResult:
        """Offer ``pages``, which hold the KV of ``key`` from page number ``start`` on.

        ``base`` is the handle of the first ``start`` pages, locked by the caller; None means an empty prefix. The cost
        is O(new pages), because the search begins at ``base``.
        """

    def evict(self, pages: int) -> I32:
        """Remove about ``pages`` unlocked pages and return them: fewer if fewer are evictable, or slightly more."""

    @property
    def evictable_pages(self) -> int:
        """Number of pages that `evict` could return now."""

    @property
    def total_pages(self) -> int:
        """Number of pages that the cache owns, locked or not."""

    def check(self) -> None:
        """Raise AssertionError if the cache's own data structure is inconsistent."""
