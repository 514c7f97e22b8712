"""A radix cache that gets the pages of an answer while the answer still grows.

`PrefixCacheManager` offers the pages of a prompt when a step computes them, and the pages of an answer when the request
ends. This one offers every page as soon as it is full. So a second question about an answer that is still being written
finds most of its KV in the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from minisgl.core import I32, EngineSpec, Req, Step
from minisgl.hooks import hookimpl
from minisgl.plugins.cache.base import Key
from minisgl.plugins.cache.prefix import PrefixCacheManager
from minisgl.plugins.cache.radix import RadixCache
from minisgl.scheduler.observer import Observer


@dataclass
class Handover:
    """A radix tree that shares the pages of running answers."""

    def build(self, page_size: int) -> HandoverCache:
        return HandoverCache(page_size)


class HandoverCache(RadixCache):
    """The shipped radix tree, with another manager of pages."""

    def make_manager(self, spec: EngineSpec, cache: HandoverCache, events: Observer) -> HandoverManager:
        """Return the manager that hands pages over while a request runs."""
        return HandoverManager(spec, cache, events)


class HandoverManager(PrefixCacheManager):
    """Hands a page to the cache as soon as the page is full."""

    def step_launched(self, step: Step, reqs: Sequence[Req]) -> None:
        """Hand over the pages that the chunks of prompts in ``step`` fill."""
        self.last_launched_step = step.id
        for req in reqs:
            self.hand_over(req)

    def free_retired(self, step: int) -> None:
        """Free what waited for the result of ``step``. Then hand over the pages that running answers have filled."""
        super().free_retired(step)
        for req in self.request_table.reqs:
            self.hand_over(req)

    def hand_over(self, req: Req) -> None:
        """Make the cache the owner of all full pages of a running request.

        A launched step may still compute the last of them: a request that finds them there runs in a later step.
        """
        table, size, index = self.request_table, self.spec.page_size, req.req_pool_idx
        ids = req.tokens()
        start, end = req.num_cached_pages, min(int(table.num_computed_tokens[index]), len(ids)) // size
        if end <= start:
            return
        offered: I32 = table.page_table[index, start:end].copy()
        key = Key(req.params.cache_salt, ids[: end * size])
        handle, cached = self.cache.insert(req.cache_handle, key, start, offered)
        self.cache.lock(handle)
        self.cache.unlock(req.cache_handle)
        req.cache_handle, req.num_cached_pages = handle, end
        self._version += 1
        is_new = offered == cached
        self.allocator.transfer_to_cache(offered[is_new], req.uid)
        self.allocator.incref(cached)
        self.events.pages_cached(self.last_launched_step, req, offered[is_new], start, cached)
        if not is_new.all():  # another request has computed the same tokens before
            columns = (start + np.flatnonzero(~is_new)).astype(np.int32)
            table.page_table[index, columns] = cached[~is_new]
            rows = np.full(len(columns), index, np.int32)
            self._page_table_updates.append((rows, columns, cached[~is_new]))
            self._retire([(req.uid, offered[~is_new])])

    def release(self, reqs: Sequence[Req]) -> None:
        """Hand over the full pages of requests that end or are retracted, and retire their other pages."""
        for req in reqs:
            self.hand_over(req)
        super().release(reqs)


@hookimpl
def minisgl_configs() -> Any:
    yield "cache", "museum", Handover
