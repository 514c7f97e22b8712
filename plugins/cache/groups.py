"""`cache=groups`: layers with a sliding window have pages of their own, which become free behind the window.

See docs/design/kv-groups.md. The cache itself is `plugins/kv_groups/tree.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from minisgl.core import EngineSpec
from minisgl.hooks import hookimpl
from minisgl.plugins.kv_groups.tree import GroupedCache

if TYPE_CHECKING:
    from minisgl.attention import AttentionBackend
    from minisgl.config import Config


@dataclass
class Groups:
    """Pages by KV group: a window's pages become free behind it, and a prefix is reused if all groups still have it."""

    def build(self, spec: EngineSpec) -> GroupedCache:
        return GroupedCache(spec)

    def wrap_attention(
        self, config: Config, first: AttentionBackend, build: Callable[[], AttentionBackend]
    ) -> AttentionBackend:
        """Return a backend for all groups. ``build`` returns another backend like ``first``."""
        from minisgl.plugins.kv_groups.attention import GroupedAttention

        return GroupedAttention(first, build, config.page_size, config.max_prefill_tokens, _obstacle(config))


def _obstacle(config: Config) -> str:
    """Return which option can't serve several groups and what to use instead; empty if all can."""
    names = {group: type(getattr(config, group)).__name__.lower() for group in ("speculation", "graph")}
    if names["speculation"] not in ("none", "nonetype", "nospeculation"):
        return "pages of drafts have one group; use speculation=none"
    if names["graph"] in ("none", "nonetype", "nograph") or (names["graph"] == "auto" and config.device != "cuda"):
        return ""
    return "graphs record one page table; use graph=none"


@hookimpl
def minisgl_configs() -> Iterator[tuple[str, str, type]]:
    yield "cache", "groups", Groups
