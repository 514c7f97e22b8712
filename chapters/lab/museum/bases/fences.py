"""A radix cache whose page allocator keeps retired pages in one list for each step, and counts how long they wait.

A retired page must not become free while a launched step may still write it. The step after which the page is free is
the page's fence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from minisgl.core import I32, EngineSpec
from minisgl.hooks import hookimpl
from minisgl.plugins.cache.prefix import PrefixCacheManager, SharedPageAllocator
from minisgl.plugins.cache.radix import RadixCache
from minisgl.scheduler.observer import Observer
from minisgl.scheduler.page_allocator import RETIRING


@dataclass
class Fences:
    """A radix tree, with a page allocator that measures how many pages wait for a step."""

    def build(self, page_size: int) -> FencedCache:
        return FencedCache(page_size)


class FencedCache(RadixCache):
    """The shipped radix tree, with another page allocator."""

    def make_manager(self, spec: EngineSpec, cache: FencedCache, events: Observer) -> PrefixCacheManager:
        """Return the scheduler's manager of pages, with the fenced allocator."""
        manager = PrefixCacheManager(spec, cache, events)
        manager.allocator = FencedAllocator(spec.num_pages, spec.max_running_requests)
        return manager


class FencedAllocator(SharedPageAllocator):
    """A page allocator with a list of retired pages for each fence. ``most_waiting`` is the largest number seen."""

    def __init__(self, num_pages: int, max_running_requests: int):
        super().__init__(num_pages, max_running_requests)
        self._waiting: dict[int, list[I32]] = {}
        self.most_waiting = 0

    def retire(self, pages: I32, owner: int | I32, after: int) -> None:
        """Take pages back from ``owner``. Steps up to ``after`` are launched."""
        self.check_owner(pages, owner, "retire")
        self.owner[pages] = RETIRING
        self.num_retiring += len(pages)
        self._waiting.setdefault(after, []).append(pages)
        self.most_waiting = max(self.most_waiting, self.num_retiring)
        if after <= self.last_read_step:  # no launched step is left
            self._open(after)

    def free_retired(self, step: int) -> None:
        """Free the pages that waited for the result of ``step``, which has been read."""
        super().free_retired(step)  # the request-pool rows
        for fence in [fence for fence in self._waiting if fence <= step]:
            self._open(fence)

    def _open(self, fence: int) -> None:
        for pages in self._waiting.pop(fence):
            self.free_retiring(pages)


@hookimpl
def minisgl_configs() -> Any:
    yield "cache", "museum", Fences
