"""`cache=naive`: no prefix cache. Every request computes its whole prompt. The baseline for `cache=radix`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from minisgl.core import I32
from minisgl.hooks import hookimpl
from minisgl.kvcache import InsertResult, Key, MatchResult

_NONE = np.empty(0, np.int32)


@dataclass
class Naive:
    """No reuse of KV: every request computes its whole prompt."""

    def build(self) -> NaiveCache:
        return NaiveCache()


class NaiveCache:
    """A prefix cache that never holds a page."""

    reuses = False
    evictable_pages = 0
    total_pages = 0

    def match(self, key: Key) -> MatchResult:
        return MatchResult(None, _NONE, 0)

    def lock(self, handle: Any) -> None:
        pass

    def unlock(self, handle: Any) -> None:
        pass

    def insert(self, base: Any, key: Key, start: int, pages: I32) -> InsertResult:
        return InsertResult(base, _NONE)

    def evict(self, pages: int) -> I32:
        return _NONE

    def check(self) -> None:
        pass


@hookimpl
def minisgl_configs() -> Any:
    yield "cache", "naive", Naive
