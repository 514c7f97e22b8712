"""`cache=naive`: no prefix cache. Every request computes its whole prompt. The baseline for `cache=radix`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from minisgl.core import EngineSpec
from minisgl.hooks import hookimpl
from minisgl.scheduler.cache_manager import CacheManager
from minisgl.scheduler.observer import Observer


@dataclass
class Naive:
    """No reuse of KV: every request computes its whole prompt."""

    def build(self) -> NaiveCache:
        return NaiveCache()


class NaiveCache:
    """No cache: requests share no pages, and the core's `CacheManager` moves them."""

    def make_manager(self, spec: EngineSpec, cache: NaiveCache, events: Observer) -> CacheManager:
        return CacheManager(spec, events)


@hookimpl
def minisgl_configs() -> Any:
    yield "cache", "naive", Naive
