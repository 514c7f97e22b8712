"""`cache=groups`: layers with a sliding window have pages of their own, which become free behind the window.

See docs/design/kv-groups.md. The cache itself is `plugins/kv_groups/tree.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from minisgl.core import EngineSpec
from minisgl.hooks import hookimpl
from minisgl.plugins.kv_groups.tree import GroupedCache


@dataclass
class Groups:
    """Pages by KV group: a window's pages become free behind it, and a prefix is reused if all groups still have it."""

    def build(self, spec: EngineSpec) -> GroupedCache:
        return GroupedCache(spec)


@hookimpl
def minisgl_configs() -> Iterator[tuple[str, str, type]]:
    yield "cache", "groups", Groups
